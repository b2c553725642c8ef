"""The training that all peers run: plain data, so that processes without JAX can read it too."""

from __future__ import annotations

import dataclasses

from benchmarks.frame import Setup

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-4


@dataclasses.dataclass(frozen=True)
class Workload:
    """Training steps of a decoder-only transformer, cut into one stage for each group.

    ``batch`` counts the sequences of a step, in all microbatches together.
    """

    groups: int
    microbatches: int
    layers: int
    d_model: int
    heads: int
    seq_len: int
    batch: int
    vocab_size: int = 256

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq_len

    def __str__(self) -> str:
        return f"{self.groups} groups, {self.microbatches} microbatches"


def tiny(groups: int, microbatches: int) -> Workload:
    """One layer on each group, one sequence in each microbatch: next to nothing to compute."""
    return Workload(groups, microbatches, groups, d_model=32, heads=2, seq_len=16, batch=microbatches)


def small(groups: int, microbatches: int) -> Workload:
    """Compute-bound tasks of milliseconds on a CPU."""
    return Workload(groups, microbatches, layers=8, d_model=256, heads=8, seq_len=64, batch=32)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The workload of a peer, and the machine that it may use."""

    workload: Workload
    setup: Setup

    @property
    def share(self) -> int:
        """The threads of each process, where each group has a process."""
        return max(1, self.setup.cores // self.workload.groups)
