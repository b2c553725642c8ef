"""Workloads and the settings of peers: plain data, so that processes without JAX can read it too."""

from __future__ import annotations

import dataclasses
import os

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-4


@dataclasses.dataclass(frozen=True)
class Workload:
    """Training steps of a decoder-only transformer, cut into one stage for each group.

    ``batch`` is the sequences of a step, in all microbatches together.
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


@dataclasses.dataclass(frozen=True)
class Setting:
    """The setup of a peer: the work, the cores that it may use in all, and the Ray to join."""

    workload: Workload
    cores: int
    ray_address: str

    @property
    def share(self) -> int:
        """The threads for each process, where there is one for each group."""
        return max(1, self.cores // self.workload.groups)


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
