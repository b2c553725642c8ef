"""Says which stage's forward or backward each equation of the loop belongs to.

Work is numbered by when one microbatch gets there: forwards of stages 0 to S-1, then backwards of stages
S-1 to 0. A value may only be read by the work that makes it and by later work, whatever the schedule.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from mpmd.errors import PerformanceWarning
from mpmd.graph import Work
from mpmd.ir import TaskKind
from mpmd.jaxpr import is_transposed, operands, size, where
from mpmd.replicate import Replica, is_weight


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The order in which one microbatch passes through the work of ``num_stages`` stages."""

    num_stages: int

    def time(self, work: Work) -> int:
        return work.stage if work.kind == "fwd" else 2 * self.num_stages - 1 - work.stage

    def work(self, time: int) -> Work:
        if time < self.num_stages:
            return Work("fwd", time)
        return Work("bwd", 2 * self.num_stages - 1 - time)

    def is_backward(self, time: int) -> bool:
        return time >= self.num_stages

    def mirrored(self, time: int) -> int:
        """The time of the same stage's other direction."""
        return 2 * self.num_stages - 1 - time


def assign(
    eqns: Sequence[JaxprEqn],
    earliest: Sequence[int | None],
    written: Sequence[int],
    closing: Mapping[Work, Sequence[Var]],
    replicas: Mapping[Var, Replica],
    timeline: Timeline,
) -> list[Work | None]:
    """The work that each equation belongs to; ``None`` for replicas.

    1. Work that a mark closes owns the backward slice of the mark's operands, less what earlier work owns.
       Only equations made by transposition count as backward; others are residuals or the loss, and belong
       to the forward that makes their operands. A gradient that passes marks by, as that of a skip
       connection, stays at the stage it comes from for as long as it does not meet others.
    2. What no mark closes goes to the latest work among its operands, or after the marks among them. If a
       parameter is among the operands and lives on other stages only, it goes to the next of those stages,
       as long as that is later. A parameter lives on the stages whose marks close what reads it; one that no
       mark closes, on the stage that its first reader is written in.
    3. What reads only loop constants, and is too dear to be a replica, goes to its earliest reader.

    An equation that reads no stage's value and that no stage reads, only a result of the loop, gets
    ``None`` as well.

    Args:
      eqns: the loop's body, without marks and without dead code.
      earliest: for each equation that reads what a mark returns, the time of the work after the mark.
      written: for each equation, the stage in whose forward it is written.
      closing: for work that ends with a mark, the mark's operands.
      replicas: the variables of equations that are computed wherever they are read.

    Warns: ``PerformanceWarning`` when a microbatch would have to pass the stages a second time, as for a
      penalty on derivatives that were taken through marks. That all goes to the latest work by then.
    """
    return _Assignment(eqns, earliest, written, replicas, timeline).run(closing)


class _Assignment:
    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        earliest: Sequence[int | None],
        written: Sequence[int],
        replicas: Mapping[Var, Replica],
        timeline: Timeline,
    ):
        self._eqns = eqns
        self._earliest = earliest
        self._written = written
        self._replicas = replicas
        self._timeline = timeline
        self._own = [i for i, eqn in enumerate(eqns) if not any(var in replicas for var in eqn.outvars)]
        self._maker = {var: i for i in self._own for var in eqns[i].outvars}
        self._times: list[int | None] = [None] * len(eqns)
        self._homes: dict[Var, set[int]] = {}  # for each parameter, the stages that read it
        self._passed_again: list[tuple[int, int]] = []

    def run(self, closing: Mapping[Work, Sequence[Var]]) -> list[Work | None]:
        closed_by = self._slices(closing)
        self._find_homes(closed_by)
        for i in self._own:
            self._set(i, self._placed(i, closed_by.get(i)))
        self._place_floating()
        if self._passed_again:
            self._warn(*self._passed_again[-1])
        return [None if time is None else self._timeline.work(time) for time in self._times]

    def _slices(self, closing: Mapping[Work, Sequence[Var]]) -> dict[int, int]:
        """For the equations in the backward slice of a mark, the time of the first such mark."""
        closed_by: dict[int, int] = {}
        for time in sorted(self._timeline.time(work) for work in closing):
            stack = list(closing[self._timeline.work(time)])
            while stack:
                i = self._maker.get(stack.pop())
                if i is not None and i not in closed_by:
                    closed_by[i] = time
                    stack.extend(operands(self._eqns[i]))
        return closed_by

    def _find_homes(self, closed_by: Mapping[int, int]) -> None:
        """Notes where forwards read parameters: the stages that marks close, then the last one.

        An equation on parameters alone, such as a penalty, may stand before the model that has them.
        """
        times: dict[int, int] = {i: t for i, t in closed_by.items() if not self._timeline.is_backward(t)}
        for i, time in times.items():
            self._note_homes(i, time)
        known = set(self._homes)
        for i in self._own:
            if i in times or is_transposed(self._eqns[i]):
                continue
            made = (times.get(self._maker[var]) for var in operands(self._eqns[i]) if var in self._maker)
            latest = max((t for t in (*made, self._earliest[i]) if t is not None), default=None)
            if latest is not None and not self._timeline.is_backward(latest):
                # A weight belongs to the stage that is written with it, whatever it is multiplied with.
                own = self._parameters(i) - known
                times[i] = max(latest, self._written[i]) if own else latest
                for parameter in own:
                    self._homes.setdefault(parameter, set()).add(times[i])

    def _set(self, i: int, time: int | None) -> None:
        self._times[i] = time
        if time is not None:
            self._note_homes(i, time)

    def _note_homes(self, i: int, time: int) -> None:
        for parameter in self._parameters(i):
            self._homes.setdefault(parameter, set()).add(self._timeline.work(time).stage)

    def _parameters(self, i: int) -> set[Var]:
        found: set[Var] = set()
        for var in operands(self._eqns[i]):
            if var in self._replicas:
                found |= self._replicas[var].weights
            elif var not in self._maker and is_weight(var):
                found.add(var)
        return found

    def _placed(self, i: int, closed_by: int | None) -> int | None:
        """The time of an equation, or ``None`` where its readers must decide."""
        timeline, eqn = self._timeline, self._eqns[i]
        made = [self._times[self._maker[var]] for var in operands(eqn) if var in self._maker]
        latest = max((time for time in (*made, self._earliest[i]) if time is not None), default=None)
        backward = is_transposed(eqn) or (latest is not None and timeline.is_backward(latest))
        if closed_by is not None and backward >= timeline.is_backward(closed_by):
            if latest is not None and latest > closed_by:
                self._passed_again.append((i, latest))
                return latest
            return latest if latest is not None and self._skips_to_mark(i, latest) else closed_by
        if latest is not None and backward and not timeline.is_backward(latest):
            latest = timeline.mirrored(latest)
        return self._nearest_home(i, latest, backward)

    def _skips_to_mark(self, i: int, latest: int) -> bool:
        """Whether a gradient that passed marks by is still at the stage before the one that a mark closes.

        It belongs to the stage whose weights made the value, as the keys of a decoder's second block, which
        read what the encoder made.
        """
        made = (var for var in operands(self._eqns[i]) if size(var) > 1 and var in self._maker)
        here = any(self._times[self._maker[var]] == latest for var in made)
        return here and self._timeline.is_backward(latest)

    def _warn(self, i: int, time: int) -> None:
        example = f"{self._eqns[i].primitive} at {where(self._eqns[i])}"
        warnings.warn(
            "a microbatch passes the stages forwards and backwards once, but the loss takes derivatives "
            f"through mark_stage_end: what follows them, such as {example}, all runs in "
            f"{self._timeline.work(time)}, on one group. Such derivatives inside one stage would be spread",
            PerformanceWarning,
            stacklevel=2,
        )

    def _nearest_home(self, i: int, earliest: int | None, backward: bool) -> int | None:
        stages = set().union(*(self._homes.get(parameter, ()) for parameter in self._parameters(i)))
        if not stages or (earliest is not None and self._timeline.work(earliest).stage in stages):
            return earliest
        kind: TaskKind = "bwd" if backward else "fwd"
        times = [self._timeline.time(Work(kind, stage)) for stage in stages]
        later = [time for time in times if earliest is None or time >= earliest]
        return min(later, default=earliest)

    def _place_floating(self) -> None:
        readers: dict[int, list[int]] = {}
        for i in self._own:
            for var in operands(self._eqns[i]):
                if var in self._maker:
                    readers.setdefault(self._maker[var], []).append(i)
        for i in reversed(self._own):
            if self._times[i] is None:
                times = [self._times[reader] for reader in readers.get(i, ())]
                first = min((time for time in times if time is not None), default=None)
                # Nobody reads what a print makes, but it happens.
                self._set(i, 0 if first is None and self._eqns[i].effects else first)
