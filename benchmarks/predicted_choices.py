"""The best candidates of a choice, each of them run; for ``benchmarks.prediction``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Mapping
from typing import Any

import jax

import mpmd
from benchmarks.chain import open_step
from benchmarks.measure import interleaved
from benchmarks.running_steps import OPTIMIZER, RunningStep, batches, initial_state
from mpmd.meshes.group_mesh import GroupMesh
from mpmd.planner.choice_table import candidate_text
from mpmd.planner.trials.realize import decisions_of
from mpmd.planner.trials.trials import StepSpec, Trials


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A row of a choice's table, with the seconds of its step.

    Attributes:
      predicted: in the table.
      run: each measurement, of several steps in a row.
    """

    candidate: str
    predicted: float
    run: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.run)


@dataclasses.dataclass(frozen=True)
class RankingCase:
    """A chain of square layers, of which all is open, and how many of the best rows run.

    Attributes:
      measure: of how many rows the tasks are measured.
    """

    layers: int
    width: int
    rows: int
    shown: int
    measure: int = 0


def ranked(
    case: RankingCase, cluster: mpmd.Cluster, mesh: GroupMesh, anywhere: bool, repetitions: int
) -> list[Ranked]:
    """Chooses for a cluster, and runs the first rows of the table, in turns.

    Args:
      mesh: groups of one device each, of all devices of the cluster.
      anywhere: whether candidates may have other groups, which are then made of this process's devices.
    """
    step = open_step(OPTIMIZER)
    x, y = batches(case.rows)
    init = functools.partial(initial_state, case.layers, case.width)
    args = (jax.eval_shape(init), x, y)
    fixes: Mapping[str, Any] = {} if anywhere else {"groups": mesh.mpmd_dim, "submesh": {"data": 1}}
    choice = mpmd.plan(step, *args, cluster=cluster, measure=case.measure, **fixes)
    trials = Trials(StepSpec.of(step, args, {}, None, None, (), (), None), cluster)
    rows = choice.rows[: case.shown]
    with contextlib.ExitStack() as meshes:
        running = []
        for row in rows:
            chosen = dataclasses.replace(
                choice,
                rows=(row,),
                decisions=decisions_of(row.candidate, trials.profiles),
                in_shardings=trials.shardings(row.candidate)[0],
            )
            groups = meshes.enter_context(chosen.mesh()) if anywhere else mesh
            running.append(RunningStep(chosen.jit(groups).compile(*args), init, x, y))
        numbered = {str(number): step.seconds for number, step in enumerate(running)}
        times = interleaved(numbered, repetitions)
    return [
        Ranked(candidate_text(row.candidate), row.prediction.seconds, tuple(times[str(number)]))
        for number, row in enumerate(rows)
    ]
