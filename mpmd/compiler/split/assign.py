"""Says which stage's forward or backward each equation of the loop belongs to."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from mpmd.compiler.jaxprs.equations import operands, size
from mpmd.compiler.jaxprs.source import is_transposed, where
from mpmd.compiler.split.duplicates import Duplicate, is_weight
from mpmd.compiler.split.microbatch_order import MicrobatchOrder
from mpmd.compiler.split.remove_marks import LoopBody
from mpmd.errors import CompileError, PerformanceWarning
from mpmd.ir.plan import TaskKind, TaskType
from mpmd.language.callbacks import callback_of
from mpmd.util.warn import warn_user


def assign(
    body: LoopBody, duplicates: Mapping[Var, Duplicate], order: MicrobatchOrder
) -> dict[JaxprEqn, TaskType]:
    """Assigns each equation of the loop's body to the work of a stage; leaves out ``duplicates``.

    1. Work that ends with a mark has every equation on which the mark depends and which no earlier work has.
       Only equations made by transposition count as backward; residuals and the loss belong to the forward
       that computes their operands. A gradient that crosses stages without a mark, such as the gradient of a
       skip connection, stays at the stage it comes from until another gradient is added to it.
    2. An equation on which no mark depends belongs to the latest work that computes one of its operands, or
       to the work after the latest mark among its operands. If it reads a parameter that is on other stages
       only, it belongs to the next stage with the parameter, if that is later. A parameter is on the stages
       whose marks depend on it; if no mark does, on the stage in which its first reader is written.
    3. An equation that reads only loop constants, and is too expensive to be duplicated, belongs to its
       earliest reader, and so does an equation that reads only values carried from microbatch to microbatch.
       An equation on carried values that no stage reads, such as a count, belongs to the first work that
       reads the carried value.

    Where microbatches are cut into slices, the latest of several works is the first work that follows all
    these in the order of a microbatch, and the earliest the last work that precedes all. A stage has the same
    parameters on all slices.

    An equation that reads no stage's value and that no stage reads, only a result of the loop, is left out as
    well. Where there is one stage, all equations are of that stage.

    Args:
      duplicates: the variables of equations that are computed wherever they are read.

    Raises: ``CompileError`` for a callback that reads the state of an operation.

    Warns: ``PerformanceWarning`` when a microbatch would have to pass the stages a second time, as for a
      penalty on derivatives that were taken through marks. All equations of the second pass belong to the
      latest work so far.
    """
    return _Assignment(body, duplicates, order).run()


class _Assignment:
    def __init__(self, body: LoopBody, duplicates: Mapping[Var, Duplicate], order: MicrobatchOrder):
        self._body = body
        self._eqns = eqns = body.eqns
        self._duplicates = duplicates
        self._order = order
        self._assignable = [
            i for i, eqn in enumerate(eqns) if not any(var in duplicates for var in eqn.outvars)
        ]
        self._maker = {var: i for i in self._assignable for var in eqns[i].outvars}
        self._positions: list[int | None] = [None] * len(eqns)
        self._states = {result.state for result in body.results if result.state is not None}
        self._stages_reading: dict[Var, set[int]] = {}  # for each parameter, the stages that read it
        self._passed_again: list[tuple[int, int]] = []
        # For what is carried, the variable that is read, and the next value; what is a literal has no maker.
        self._carried: dict[Var, Any] = {
            result.state: None if isinstance(result.value, Literal) else result.value
            for result in body.results
            if result.is_carry and result.state is not None
        }

    def run(self) -> dict[JaxprEqn, TaskType]:
        self._check_callbacks()
        closed_by = self._before_marks(self._body.closing)
        self._find_stages_reading(closed_by)
        for i in self._assignable:
            self._set(i, self._placed(i, closed_by.get(i)))
        self._place_floating()
        self._place_carried()
        self._place_floating()  # what reads it may have a place only now
        if self._passed_again:
            self._warn(*self._passed_again[-1])
        return {
            eqn: self._order.work(position)
            for eqn, position in zip(self._eqns, self._positions, strict=True)
            if position is not None
        }

    def _check_callbacks(self) -> None:
        """A callback on the state of an operation would have to run where the state is updated."""
        of_states = {
            result.state for result in self._body.results if result.state is not None and not result.is_carry
        }
        faults = []
        for eqn in self._eqns if of_states else ():
            if not of_states.isdisjoint(operands(eqn)):
                of_states.update(eqn.outvars)
                if eqn.effects:
                    call = callback_of(eqn) or f"{eqn.primitive} at {where(eqn)}"
                    faults.append(
                        f"{call} reads the state of an operation; call it in the "
                        "function that treduce applies, on what that returns"
                    )
        if faults:
            raise CompileError(faults)

    def _before_marks(self, closing: Mapping[TaskType, Sequence[Var]]) -> dict[int, int]:
        """For the equations that marks depend on, the last position that comes before all such marks."""
        needed_by: dict[Var, list[int]] = collections.defaultdict(list)
        for work, variables in closing.items():
            for var in variables:
                needed_by[var].append(self._order.position(work))
        closed_by: dict[int, int] = {}
        for i in reversed(self._assignable):
            eqn = self._eqns[i]
            if positions := [p for var in eqn.outvars for p in needed_by.get(var, ())]:
                closed_by[i] = self._order.earliest(positions)
                for var in operands(eqn):
                    needed_by[var].append(closed_by[i])
        return closed_by

    def _find_stages_reading(self, closed_by: Mapping[int, int]) -> None:
        """Notes where forwards read parameters: the stages that marks close, then the last one.

        An equation on parameters alone, such as a penalty, may stand before the model that has them.
        """
        positions: dict[int, int] = {i: t for i, t in closed_by.items() if not self._order.is_backward(t)}
        for i, position in positions.items():
            self._add_stage_reading(i, position)
        known = set(self._stages_reading)
        for i in self._assignable:
            if i in positions or is_transposed(self._eqns[i]):
                continue
            operand_positions = (
                positions.get(self._maker[var]) for var in operands(self._eqns[i]) if var in self._maker
            )
            latest = self._latest((*operand_positions, self._body.earliest[i]))
            if latest is not None and not self._order.is_backward(latest):
                # A weight belongs to the stage in which it is written, not to that of the other operand.
                parameters = self._parameters(i) - known
                if self._order.slices > 1:  # and on later slices to the same stage
                    parameters -= self._stages_reading.keys()
                written = self._order.position(TaskType("fwd", self._body.written[i]))
                positions[i] = self._order.latest((latest, written)) if parameters else latest
                for parameter in parameters:
                    self._add_stages(parameter, positions[i])

    def _set(self, i: int, position: int | None) -> None:
        self._positions[i] = position
        if position is not None:
            self._add_stage_reading(i, position)

    def _add_stage_reading(self, i: int, position: int) -> None:
        for parameter in self._parameters(i):
            self._add_stages(parameter, position)

    def _add_stages(self, parameter: Var, position: int) -> None:
        """Notes that the stage at a position, on all slices, reads a parameter."""
        numbers = self._order.numbers
        stages = numbers.of_stage(numbers.stage_of(self._order.work(position).stage))
        self._stages_reading.setdefault(parameter, set()).update(stages)

    def _latest(self, positions: Iterable[int | None]) -> int | None:
        """The first position that comes at or after all that are known; ``None`` if none is."""
        known = [position for position in positions if position is not None]
        return self._order.latest(known) if known else None

    def _earliest(self, positions: Iterable[int | None]) -> int | None:
        """The last position that comes at or before all that are known; ``None`` if none is."""
        known = [position for position in positions if position is not None]
        return self._order.earliest(known) if known else None

    def _parameters(self, i: int) -> set[Var]:
        parameters: set[Var] = set()
        for var in operands(self._eqns[i]):
            if var in self._duplicates:
                parameters |= self._duplicates[var].weights
            elif var not in self._maker and var not in self._states and is_weight(var):
                parameters.add(var)
        return parameters

    def _placed(self, i: int, closed_by: int | None) -> int | None:
        """The position of an equation, or ``None`` where its readers must decide."""
        order, eqn = self._order, self._eqns[i]
        latest = self._latest((*self._operand_positions(i), self._body.earliest[i]))
        if latest is None and order.num_stages == 1:
            latest = order.position(TaskType("fwd", order.stages.start))
        backward = is_transposed(eqn) or (latest is not None and order.is_backward(latest))
        if closed_by is not None and backward >= order.is_backward(closed_by):
            if latest is not None and not order.precedes(latest, closed_by):
                self._passed_again.append((i, latest))
                return latest
            return latest if latest is not None and self._skips_to_mark(i, latest) else closed_by
        if latest is not None and backward and not order.is_backward(latest):
            latest = order.mirrored(latest)
        return self._nearest_stage_reading(i, latest, backward)

    def _skips_to_mark(self, i: int, latest: int) -> bool:
        """Whether a gradient that crossed stages without a mark is still at the stage that it comes from.

        It belongs to the stage whose weights made the value. An example is the keys of a decoder's second
        block, which read what the encoder made.
        """
        arrays = (var for var in operands(self._eqns[i]) if size(var) > 1 and var in self._maker)
        here = any(self._positions[self._maker[var]] == latest for var in arrays)
        return here and self._order.is_backward(latest)

    def _warn(self, i: int, position: int) -> None:
        example = f"{self._eqns[i].primitive} at {where(self._eqns[i])}"
        warn_user(
            "a microbatch passes the stages forwards and backwards once, but the loss takes derivatives "
            f"through mark_stage_end: what follows them, such as {example}, all runs in "
            f"{self._order.work(position)}, on one group. Take such derivatives within one stage instead",
            PerformanceWarning,
        )

    def _nearest_stage_reading(self, i: int, earliest: int | None, backward: bool) -> int | None:
        stages = set().union(*(self._stages_reading.get(parameter, ()) for parameter in self._parameters(i)))
        if not stages or (earliest is not None and self._order.work(earliest).stage in stages):
            return earliest
        kind: TaskKind = "bwd" if backward else "fwd"
        positions = [self._order.position(TaskType(kind, stage)) for stage in stages]
        later = [p for p in positions if earliest is None or self._order.precedes(earliest, p)]
        return min(later, default=earliest)

    def _place_floating(self) -> None:
        readers: dict[int, list[int]] = {}
        for i in self._assignable:
            for var in operands(self._eqns[i]):
                if var in self._maker:
                    readers.setdefault(self._maker[var], []).append(i)
        for i in reversed(self._assignable):
            if self._positions[i] is None:
                first = self._earliest(self._positions[reader] for reader in readers.get(i, ()))
                if first is None and self._eqns[i].effects:
                    # What depends on no stage, such as a print of the index, is where it is written.
                    first = self._order.position(TaskType("fwd", self._body.written[i]))
                self._set(i, first)

    def _place_carried(self) -> None:
        """Places the equations that compute and, for results alone, read carried values.

        Carried values whose updates read one another are updated by one work, the first that reads any of the
        values.
        """
        updated: dict[Var, int] = {}  # the position of the work that updates each carried value
        for states in self._carried_together():
            makers = [self._maker.get(self._carried[state]) for state in states]
            reading = (i for i in self._assignable if not states.isdisjoint(operands(self._eqns[i])))
            first = self._earliest(self._positions[i] for i in reading)
            if first is None:
                first = self._latest(self._positions[i] for i in makers if i is not None) or 0
            for state in states:
                for i in self._unplaced_slice(self._carried[state]):
                    self._set(i, first)
                maker = self._maker.get(self._carried[state])
                position = None if maker is None else self._positions[maker]
                updated[state] = first if position is None else position
        for i in self._assignable:
            if self._positions[i] is None:
                read = operands(self._eqns[i])
                updates = (updated[var] for var in read if var in updated)
                self._set(i, self._latest((*self._operand_positions(i), *updates)))

    def _operand_positions(self, i: int) -> list[int | None]:
        read = operands(self._eqns[i])
        return [self._positions[self._maker[var]] for var in read if var in self._maker]

    def _unplaced_slice(self, value: Var | None) -> set[int]:
        unplaced: set[int] = set()
        stack: list[Any] = [value]
        while stack:
            i = self._maker.get(stack.pop())
            if i is not None and i not in unplaced and self._positions[i] is None:
                unplaced.add(i)
                stack.extend(operands(self._eqns[i]))
        return unplaced

    def _carried_together(self) -> list[set[Var]]:
        """Sets of carried values that unplaced equations update from one another."""
        together: list[set[Var]] = []
        for state, value in self._carried.items():
            read = {state, *([value] if value in self._carried else [])}
            for i in self._unplaced_slice(value):
                read.update(var for var in operands(self._eqns[i]) if var in self._carried)
            overlapping = [states for states in together if not states.isdisjoint(read)]
            together = [states for states in together if states not in overlapping]
            together.append(read.union(*overlapping))
        return together
