"""Searches for the best ways to run a step with several loops.

The loops share the groups, how weights are divided over ``data``, and the number of microbatches where the
step leaves it open. Each loop has its own stages, schedule and rematerialisation. A loop begins when the
previous loop has ended, so on shared groups the best step consists of the best candidate of each loop, and
its time is the sum of their times. The search tries the shared decisions that the best candidates of each
single loop have.

The profile of each loop includes the memory that the rest of the loops hold meanwhile: their weights, and
the state that is updated with these weights.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from mpmd.planner.candidate import Candidate, Prediction, Row
from mpmd.planner.constraints import Constraints
from mpmd.planner.layer_profile import LayerProfile, TaskWork
from mpmd.planner.pools import AnyCluster
from mpmd.planner.reasons import StepDoesNotFit, ranked, shortage
from mpmd.planner.search.candidates import best_cut, best_of
from mpmd.planner.search.families import family_of
from mpmd.planner.search.orders import num_simulated_tasks
from mpmd.planner.search.refusals import combined, contradictions
from mpmd.planner.search.search import MOST_TASKS, NUM_ROWS, as_written, search
from mpmd.planner.search.search_space import SearchSpace
from mpmd.planner.search.stages import CostModel
from mpmd.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class _TypicalLoop:
    """A loop that stands for all loops like it.

    Attributes:
      space: its choices.
      rows: the best ways to run it by itself.
    """

    space: SearchSpace
    rows: tuple[Row, ...]

    def uncut_on(self, shared: Candidate) -> Iterator[Candidate]:
        """Uncut candidates of the loop on the most of the shared groups that it can take.

        They have the schedules of its rows.

        Args:
          shared: a candidate with the groups and the decisions that all loops share.
        """
        schedules = {(family_of(row.candidate.schedule), row.candidate.stages_per_group) for row in self.rows}
        for groups in range(len(shared.submeshes), 0, -1):
            has_schedule = False
            for name, number in sorted(schedules):
                schedule = self.space.schedule(name, groups * number, groups)
                if schedule is not None:
                    uncut = dataclasses.replace(
                        shared, submeshes=shared.submeshes[:groups], schedule=schedule
                    )
                    for variant in self._variants(uncut):
                        has_schedule = True
                        yield variant
            if has_schedule:
                return

    def _variants(self, uncut: Candidate) -> Iterator[Candidate]:
        """The candidate with what the loop may still decide: rematerialisation, and fixed microbatches."""
        number = self.space.profile.num_microbatches or uncut.num_microbatches
        for variant in self.space.variants(uncut):
            if variant.num_microbatches == number and variant.shared == uncut.shared:
                yield variant


def search_loops(
    profiles: Sequence[LayerProfile],
    cluster: AnyCluster,
    constraints: Sequence[Constraints],
    exhaustive: bool = True,
) -> tuple[Row, ...]:
    """The best candidates, the shortest step first, and the alternatives to a pipeline; as ``search``.

    Args:
      profiles: of the loops, in order.
      constraints: of each loop. A loop with fewer layers than there are groups takes fewer groups.

    Raises: ``ValueError`` as ``search``; faults of a loop name the loop.
    """
    if len(profiles) == 1:
        return search(profiles[0], cluster, constraints[0], exhaustive)
    kinds = _kinds(profiles)
    loops = _loops({kind: kinds.index(kind) for kind in kinds}, profiles, cluster, constraints, exhaustive)
    rows: list[Row] = []
    num_tasks = 0
    # A number of groups that is fixed for the loop with most layers is fixed for the step.
    groups = max(loop.space.constraints.groups or 0 for loop in loops.values())
    for shared in _shared_decisions([*loops.values()]):
        if num_tasks > MOST_TASKS or (groups and len(shared.submeshes) != groups):
            continue
        best, tasks = _best_on(shared, loops, cluster)
        num_tasks += tasks
        if best is not None:
            rows.append(_row(shared, [best[kind] for kind in kinds], cluster))
    if all(shortage(row, cluster) for row in rows):
        least = min(rows, key=lambda row: row.missing_bytes(cluster), default=None)
        why = shortage(least, cluster) if least else "no groups suit all of them"
        raise StepDoesNotFit(
            f"the loops of the step, each of which can be run, cannot be run together: {why}"
        )
    return ranked(rows, cluster, NUM_ROWS)


def loops_as_written(
    profiles: Sequence[LayerProfile],
    cluster: AnyCluster,
    written: Sequence[Schedule | None],
    constraints: Constraints,
) -> Row | None:
    """The best candidate with the schedules that the loops have themselves.

    ``None`` where a loop has none, another one is fixed, or the loops, the constraints or the number of
    devices do not allow these schedules.
    """
    schedules = [schedule for schedule in written if schedule is not None]
    if len(schedules) < len(profiles) or constraints.schedule is not None:
        return None
    if len(profiles) == 1:
        return as_written(profiles[0], cluster, schedules[0], constraints)
    each = [dataclasses.replace(constraints, schedule=schedule) for schedule in schedules]
    try:
        rows = search_loops(profiles, cluster, each, exhaustive=False)
    except ValueError:  # contradictions, or nothing fits
        return None
    return dataclasses.replace(rows[0], label="as written")


def _kinds(profiles: Sequence[LayerProfile]) -> list[int]:
    """For each loop, the number of the first loop with the same layers or the same decisions."""
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
    cluster: AnyCluster,
    constraints: Sequence[Constraints],
    exhaustive: bool,
) -> dict[int, _TypicalLoop]:
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
            rows = search(profile, cluster, of_kind, exhaustive)
        except ValueError as error:
            refusal = StepDoesNotFit if isinstance(error, StepDoesNotFit) else ValueError
            raise refusal(f"loop {kind}: {error}") from error
        loops[kind] = _TypicalLoop(SearchSpace(CostModel(profile, cluster), of_kind), rows)
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


def _shared_decisions(loops: Sequence[_TypicalLoop]) -> Iterable[Candidate]:
    """Returns a candidate for each choice of the shared decisions: first of the alternatives to a pipeline,
    then of the best row of each loop."""

    def is_open(loop: _TypicalLoop) -> bool:
        return loop.space.profile.num_microbatches is None

    numbers = (row.candidate.num_microbatches for loop in loops if is_open(loop) for row in loop.rows)
    usual = next(numbers, None)

    def with_number(loop: _TypicalLoop, row: Row) -> Candidate:
        if is_open(loop) or usual is None:
            return row.candidate
        return dataclasses.replace(row.candidate, num_microbatches=usual)

    def key(candidate: Candidate) -> Hashable:
        return candidate.shared, candidate.num_microbatches if usual else None

    alternatives = [(loops[0], row) for row in loops[0].rows if row.label]
    ordered = itertools.zip_longest(*([(loop, row) for row in loop.rows] for loop in loops))
    chosen: dict[Hashable, Candidate] = {}
    for pair in itertools.chain(alternatives, *ordered):
        if pair is not None:
            candidate = with_number(*pair)
            chosen.setdefault(key(candidate), candidate)
    return chosen.values()


def _best_on(
    shared: Candidate, loops: Mapping[int, _TypicalLoop], cluster: AnyCluster
) -> tuple[dict[int, Row] | None, int]:
    """The best of each loop on shared groups, ``None`` if one cannot run on them; and the simulated tasks."""
    best, num_tasks = {}, 0
    for kind, loop in loops.items():
        cuts = (best_cut(loop.space, uncut) for uncut in loop.uncut_on(shared))
        evaluations = [evaluation for evaluation in cuts if evaluation is not None]
        num_tasks += sum(num_simulated_tasks(evaluation.candidate) for evaluation in evaluations)
        evaluation = best_of(evaluations, cluster)
        if evaluation is None:
            return None, num_tasks
        best[kind] = evaluation
    return best, num_tasks


def _row(shared: Candidate, loops: Sequence[Row], cluster: AnyCluster) -> Row:
    """The row of a step: the sum of the times of its loops, and the memory of the loop that lacks the most
    memory."""
    first, *later = (dataclasses.replace(e.candidate, submeshes=shared.submeshes) for e in loops)
    seconds = sum(evaluation.seconds for evaluation in loops)
    groups = len(shared.submeshes)

    def mean(shares: Iterator[float]) -> float:
        pairs = zip(shares, loops, strict=True)
        return sum(share * evaluation.seconds for share, evaluation in pairs) / seconds if seconds else 0.0

    idle = (1 - (1 - e.prediction.bubble) * e.candidate.schedule.mpmd_dim / groups for e in loops)
    prediction = Prediction(
        seconds=seconds,
        bubble=mean(idle),
        communication=mean(evaluation.prediction.communication for evaluation in loops),
        memory=max(
            loops, key=lambda e: (e.missing_bytes(cluster), e.prediction.memory.total)
        ).prediction.memory,
        stage_seconds=tuple(itertools.chain(*(e.prediction.stage_seconds for e in loops))),
        source="formula",
    )
    return Row(dataclasses.replace(first, later=tuple(later)), prediction)
