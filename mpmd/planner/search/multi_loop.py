"""Searches for the best ways to run a step with several loops.

The loops share the groups, how weights are divided over ``data``, and the number of microbatches where the
step leaves it open: their *ground*. Each has its own stages, schedule and rematerialisation. One loop begins
where the one before has ended, so on a ground the best step consists of the best of each loop, and its time
is their sum. The grounds that are tried are those of the best candidates of each loop by itself.

The memory that other loops hold meanwhile, for their weights and the state updated with these, is in the
profile of each loop.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from mpmd.planner.candidate import Candidate, Prediction, Row
from mpmd.planner.collectives import Submesh
from mpmd.planner.constraints import Constraints
from mpmd.planner.hardware import Hardware
from mpmd.planner.layer_profile import LayerProfile, TaskWork
from mpmd.planner.reasons import ranked, shortage
from mpmd.planner.search.candidates import best_of, best_of_shape
from mpmd.planner.search.contradictions import combined, contradictions
from mpmd.planner.search.formula import Evaluation
from mpmd.planner.search.layer_arrays import StepSettings
from mpmd.planner.search.search import NUM_ROWS, USUAL, SearchBudget, search
from mpmd.planner.search.search_space import SearchSpace, Shape
from mpmd.planner.search.stages import CostModel
from mpmd.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Ground:
    """Choices that all loops of a step share.

    Attributes:
      submeshes: of the groups.
      num_microbatches: of the loops that leave it open; ``None`` if none does.
      fsdp, gather_once: as of ``Candidate``.
    """

    submeshes: tuple[Submesh, ...]
    num_microbatches: int | None
    fsdp: bool
    gather_once: bool

    def __hash__(self) -> int:
        return hash((tuple(tuple(submesh.items()) for submesh in self.submeshes), self.num_microbatches))


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop that stands for all loops like it.

    Attributes:
      space: its choices.
      rows: the best ways to run it by itself.
    """

    space: SearchSpace
    rows: tuple[Row, ...]

    def ground(self, candidate: Candidate) -> Ground:
        """The ground of a candidate of this loop."""
        is_open = self.space.profile.num_microbatches is None
        number = candidate.num_microbatches if is_open else None
        return Ground(candidate.submeshes, number, candidate.fsdp, candidate.gather_once)

    def on(self, ground: Ground) -> Iterator[Shape]:
        """Shapes of the loop on the most groups of a ground that it can take, with its rows' schedules."""
        schedules = {(row.candidate.schedule.name, row.candidate.stages_per_group) for row in self.rows}
        for groups in range(len(ground.submeshes), 0, -1):
            submeshes, has_schedule = ground.submeshes[:groups], False
            for (name, number), settings in itertools.product(
                sorted(schedules), self._settings(ground, submeshes)
            ):
                schedule = self.space.schedule(name, groups * number, groups)
                if schedule is not None:
                    has_schedule = True
                    yield Shape(schedule, submeshes, settings)
            if has_schedule:
                return

    def _settings(self, ground: Ground, submeshes: tuple[Submesh, ...]) -> Iterator[StepSettings]:
        number = self.space.profile.num_microbatches or ground.num_microbatches
        for settings in self.space.settings(submeshes):
            if (settings.num_microbatches, settings.fsdp, settings.gather_once) == (
                number,
                ground.fsdp,
                ground.gather_once,
            ):
                yield settings


def search_loops(
    profiles: Sequence[LayerProfile],
    cluster: Hardware,
    constraints: Sequence[Constraints],
    budget: SearchBudget = USUAL,
) -> tuple[Row, ...]:
    """The best candidates, the shortest step first, and the alternatives to a pipeline; as ``search``.

    Args:
      profiles: of the loops, in order.
      constraints: of each loop. A loop with fewer layers than there are groups takes fewer groups.

    Raises: ``ValueError`` as ``search``; faults of a loop name the loop.
    """
    kinds = _kinds(profiles)
    loops = _loops({kind: kinds.index(kind) for kind in kinds}, profiles, cluster, constraints, budget)
    rows: list[Row] = []
    num_tasks = 0
    # A number of groups that is fixed for the loop with most layers is fixed for the step.
    groups = max(loop.space.constraints.groups or 0 for loop in loops.values())
    for label, ground in _grounds([*loops.values()]):
        if groups and len(ground.submeshes) != groups:
            continue
        if num_tasks > budget.tasks and not label:
            continue
        best, tasks = _best_on(ground, loops, cluster)
        num_tasks += tasks
        if best is not None:
            rows.append(_row(label, ground, [best[kind] for kind in kinds]))
    if all(shortage(row.prediction, cluster) for row in rows):
        least = min(rows, key=lambda row: row.prediction.memory.total, default=None)
        why = shortage(least.prediction, cluster) if least else "no groups suit all of them"
        raise ValueError(f"the loops of the step, each of which can be run, cannot be run together: {why}")
    return ranked(rows, cluster, NUM_ROWS)


def loops_as_written(
    profiles: Sequence[LayerProfile],
    cluster: Hardware,
    schedules: Sequence[Schedule],
    constraints: Constraints,
) -> Row | None:
    """The best candidate with the schedules that the loops have themselves.

    ``None`` where the loops, the constraints or the number of devices do not allow these schedules.
    """
    each = [dataclasses.replace(constraints, schedule=schedule) for schedule in schedules]
    try:
        rows = search_loops(profiles, cluster, each, SearchBudget(improved=0, exhaustive=False))
    except ValueError:  # contradictions, or nothing fits
        return None
    return dataclasses.replace(rows[0], label="as written")


def _kinds(profiles: Sequence[LayerProfile]) -> list[int]:
    """For each loop the number of the first one like it: of the same layers, or under the same decisions."""
    kinds: list[int] = []
    for number, profile in enumerate(profiles):
        like = (
            other
            for other, earlier in enumerate(profiles[:number])
            if profile.decision_index == earlier.decision_index or _layers(profile) == _layers(earlier)
        )
        first = next(like, number)
        kinds.append(kinds[first] if first < number else number)
    return kinds


def _layers(profile: LayerProfile) -> LayerProfile:
    """The profile of the loop's layers alone, without the state of other loops and the work outside."""
    layers = tuple(dataclasses.replace(layer, state=0) for layer in profile.layers)
    return dataclasses.replace(profile, layers=layers, outside=TaskWork(0.0, 0.0), batch=0, decision_index=0)


def _loops(
    kinds: Mapping[int, int],
    profiles: Sequence[LayerProfile],
    cluster: Hardware,
    constraints: Sequence[Constraints],
    budget: SearchBudget,
) -> dict[int, _Loop]:
    """Each kind of loop, searched by itself. Raises ``ValueError`` with all conflicts of constraints."""
    most = max(len(profile.layers) for profile in profiles)
    constraints_of, faults = {}, []
    for kind in kinds:
        profile = profiles[kind]
        of_kind = constraints_of[kind] = combined(
            _on_fewer_groups(constraints[kind], len(profile.layers), most), profile
        )
        faults += [f"loop {kind}: {fault}" for fault in contradictions(of_kind, profile, cluster)]
    if faults:
        raise ValueError("\n".join(faults))
    loops = {}
    for kind, of_kind in constraints_of.items():
        profile = profiles[kind]
        try:
            rows = search(profile, cluster, of_kind, budget)
        except ValueError as error:
            raise ValueError(f"loop {kind}: {error}") from error
        loops[kind] = _Loop(SearchSpace(CostModel(profile, cluster), of_kind), rows)
    return loops


def _on_fewer_groups(constraints: Constraints, num_layers: int, most: int) -> Constraints:
    """The constraints of a loop, on fewer groups if it has fewer layers than there are groups.

    Args:
      most: the layers of the loop that has most.
    """
    submesh, groups = constraints.submesh, constraints.groups
    if isinstance(submesh, tuple):
        groups = groups or len(submesh)
    if groups is None or not num_layers < groups <= most:
        return constraints
    fewer = submesh[:num_layers] if isinstance(submesh, tuple) else submesh
    return dataclasses.replace(constraints, groups=num_layers, submesh=fewer)


def _grounds(loops: Sequence[_Loop]) -> list[tuple[str, Ground]]:
    """The grounds of the loops' rows, the best of each loop first; grounds of alternatives have labels."""
    numbers = [loop.ground(row.candidate).num_microbatches for loop in loops for row in loop.rows]
    usual = next((number for number in numbers if number is not None), None)

    def ground(loop: _Loop, row: Row) -> Ground:
        """The ground of a row, with the usual number of microbatches where the loop leaves none open."""
        of_row = loop.ground(row.candidate)
        return of_row if of_row.num_microbatches else dataclasses.replace(of_row, num_microbatches=usual)

    labelled = [(row.label, ground(loops[0], row)) for row in loops[0].rows if row.label]
    known = {of_label for _, of_label in labelled}
    ordered = itertools.zip_longest(*([(loop, row) for row in loop.rows] for loop in loops))
    pairs = filter(None, itertools.chain.from_iterable(ordered))
    others = dict.fromkeys(ground(loop, row) for loop, row in pairs)
    return [*labelled, *(("", other) for other in others if other not in known)]


def _best_on(
    ground: Ground, loops: Mapping[int, _Loop], cluster: Hardware
) -> tuple[dict[int, Evaluation] | None, int]:
    """The best of each loop on a ground, ``None`` if a loop cannot run on it; and the simulated tasks."""
    best, num_tasks = {}, 0
    for kind, loop in loops.items():
        evaluations = [e for shape in loop.on(ground) if (e := best_of_shape(loop.space, shape)) is not None]
        num_tasks += sum(evaluation.num_tasks for evaluation in evaluations)
        evaluation = best_of(evaluations, cluster.memory)
        if evaluation is None:
            return None, num_tasks
        best[kind] = evaluation
    return best, num_tasks


def _row(label: str, ground: Ground, loops: Sequence[Evaluation]) -> Row:
    """The row of a step: the times of its loops add up; the memory is that of the loop that needs most."""
    first, *later = (dataclasses.replace(e.candidate, submeshes=ground.submeshes) for e in loops)
    seconds = sum(evaluation.seconds for evaluation in loops)
    groups = len(ground.submeshes)

    def mean(shares: Iterator[float]) -> float:
        pairs = zip(shares, loops, strict=True)
        return sum(share * evaluation.seconds for share, evaluation in pairs) / seconds if seconds else 0.0

    idle = (1 - (1 - e.prediction.bubble) * e.candidate.schedule.mpmd_dim / groups for e in loops)
    prediction = Prediction(
        seconds=seconds,
        bubble=mean(idle),
        communication=mean(evaluation.prediction.communication for evaluation in loops),
        memory=max((e.prediction.memory for e in loops), key=lambda memory: memory.total),
        stage_seconds=tuple(itertools.chain(*(e.prediction.stage_seconds for e in loops))),
        source="formula",
    )
    return Row(dataclasses.replace(first, later=tuple(later)), prediction, label)
