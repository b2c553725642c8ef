"""Evaluates the equations of a task one by one, and follows NaNs and infinities to where they are made."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpmd.replay.record import (
    Block,
    Conditional,
    Constant,
    Equation,
    Equations,
    Scan,
    Single,
    Source,
    Unportable,
    While,
)
from mpmd.replay.values import Range, constant_of, count_nonfinite, is_finite

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any asin asinh atan atan2 atanh cbrt convert_element_type cos cosh digamma div "
    "erf erf_inv erfc exp exp2 expm1 integer_pow lgamma log log1p logistic mul neg pow reduce_precision rem "
    "rsqrt sin sinh sqrt square sub tan tanh".split()
)
"""Primitives that make each element of the elements at its position."""

Call = Callable[..., Sequence[np.ndarray]]
"""Runs an equation."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """An equation that makes a NaN or an infinity which none of its operands explains.

    Attributes:
      kind: ``NaN`` or ``infinity``.
      number: how many equations were evaluated before.
      path: the equation, and the loops and branches that it is in, with their iterations.
      source: its primitive and the user's line.
      operands, results: the ranges of their values.
    """

    kind: str
    number: int
    path: tuple[str, ...]
    source: Source
    operands: tuple[Range, ...]
    results: tuple[Range, ...]


class Value(NamedTuple):
    """A value of an equation: ``None`` where it is not known, with the origin of what is not finite in it."""

    array: np.ndarray | None
    origin: Origin | None = None


UNKNOWN = Value(None)


class Evaluated(NamedTuple):
    """An equation that was evaluated, with its operands and results; see ``Origin`` for its path."""

    path: tuple[str, ...]
    source: Source
    operands: Sequence[np.ndarray]
    results: Sequence[np.ndarray]


class Evaluator:
    """Evaluates equations.

    Results that depend on a lost operand, or on an equation that has no portable form, are unknown.

    Args:
      equations: of a task.
      call_of: gives the function of an export by its number.
      observe: is called after each equation without a body; by default, nothing is.
    """

    def __init__(
        self,
        equations: Equations,
        call_of: Callable[[int], Call],
        observe: Callable[[Evaluated], object] = lambda evaluated: None,
    ):
        self._equations = equations
        self._call_of = call_of
        self._observe = observe
        self._last_uses: dict[int, Mapping[int, int]] = {}
        self.count = 0
        """The number of equations that were evaluated, each as often as it was."""
        self.skipped: dict[Single, None] = {}
        """The equations that could not be evaluated, because they have no portable form."""
        self.origins: list[Origin] = []
        """All equations that have made a NaN or an infinity, also one that no result has."""

    def run(self, inputs: Sequence[np.ndarray | None]) -> list[Value]:
        """The results of the task. Of what is not finite in the inputs, the origin is ``None``."""
        return self._run(self._equations.block, [Value(array) for array in inputs], ())

    def _run(self, block: Block, inputs: Sequence[Value], path: tuple[str, ...]) -> list[Value]:
        table = dict(zip(block.inputs, inputs, strict=True))
        last_uses = self._last_uses_in(block)
        for position, equation in enumerate(block.equations):
            self._evaluate(equation, position, table, path)
            for number in _reads(equation):  # a stage's values need not all fit into memory
                if last_uses[number] == position:
                    table.pop(number, None)
        return [table[number] for number in block.outputs]

    def _last_uses_in(self, block: Block) -> Mapping[int, int]:
        """The position of the last equation that reads each value; a block's results are read at its end."""
        if id(block) not in self._last_uses:
            uses = {n: i for i, equation in enumerate(block.equations) for n in _reads(equation)}
            self._last_uses[id(block)] = uses | dict.fromkeys(block.outputs, len(block.equations))
        return self._last_uses[id(block)]

    def _evaluate(
        self, equation: Equation, position: int, table: dict[int, Value], path: tuple[str, ...]
    ) -> None:
        if isinstance(equation, Constant):
            table[equation.makes] = Value(constant_of(equation.data, equation.dtype, equation.shape))
            return
        source = self._equations.sources[equation.source]
        path = (*path, f"equation {position} {source.primitive}")
        operands = [table[number] for number in equation.reads]
        match equation:
            case Single():
                results = self._single(equation, source, operands, path)
            case Scan():
                results = self._scan(equation, operands, path)
            case Conditional():
                results = self._conditional(equation, operands, path)
            case While():
                results = self._while(equation, operands, path)
        table.update(zip(equation.makes, results, strict=True))

    def _single(
        self, equation: Single, source: Source, operands: Sequence[Value], path: tuple[str, ...]
    ) -> list[Value]:
        if isinstance(self._equations.exports[equation.export], Unportable):
            self.skipped[equation] = None
            return [UNKNOWN] * len(equation.makes)
        arrays = [value.array for value in operands if value.array is not None]
        if len(arrays) < len(operands):
            return [UNKNOWN] * len(equation.makes)
        results = [np.asarray(result) for result in self._call_of(equation.export)(*arrays)]
        evaluated = Evaluated(path, source, arrays, results)
        self._observe(evaluated)
        origin = self._origin(evaluated, operands)
        self.count += 1
        return [Value(result, origin if any(count_nonfinite(result)) else None) for result in results]

    def _origin(self, evaluated: Evaluated, operands: Sequence[Value]) -> Origin | None:
        """The origin of what is not finite in the results; ``None``: the inputs, or a constant infinity."""
        made = [count_nonfinite(result) for result in evaluated.results]
        num_nans, num_infs = (sum(counts) for counts in zip(*made, strict=True)) if made else (0, 0)
        if not num_nans and not num_infs:
            return None
        read = [(value, count_nonfinite(value.array)) for value in operands if value.array is not None]
        with_nans = [value for value, (nans, _) in read if nans]
        with_infs = [value for value, (_, infs) in read if infs]
        explaining = _first(with_nans or with_infs)
        # NaNs of a constant infinity are made here: it may be a mask, which does no harm by itself.
        is_explained = bool(with_nans or (with_infs and (not num_nans or explaining is not None)))
        num_nans_here = num_nans
        if is_explained and explaining is None:  # by an input or a constant, but perhaps not all elements
            is_made_here = _of_finite_elements(evaluated)
            num_nans_here = (
                int(np.isnan(evaluated.results[0][is_made_here]).sum()) if is_made_here.any() else 0
            )
            is_explained = not is_made_here.any()
        if is_explained:
            return explaining
        origin = Origin(
            kind="NaN" if num_nans_here else "infinity",
            number=self.count,
            path=evaluated.path,
            source=evaluated.source,
            operands=tuple(map(Range.of, evaluated.operands)),
            results=tuple(map(Range.of, evaluated.results)),
        )
        self.origins.append(origin)
        return origin

    def _scan(self, scan: Scan, operands: Sequence[Value], path: tuple[str, ...]) -> list[Value]:
        consts = operands[: scan.num_consts]
        carry = list(operands[scan.num_consts : scan.num_consts + scan.num_carry])
        stacks = operands[scan.num_consts + scan.num_carry :]
        num_stacked = len(scan.makes) - scan.num_carry
        if any(stack.array is not None and stack.array.shape[:1] != (scan.length,) for stack in stacks):
            raise ValueError(f"{text_of(path)} scans over other arrays than of {scan.length} rows")
        rows: list[list[Value]] = [[] for _ in range(num_stacked)]
        iterations = range(scan.length)
        for i in reversed(iterations) if scan.reverse else iterations:
            inputs = [*consts, *carry, *(_row(stack, i) for stack in stacks)]
            results = self._run(scan.body, inputs, (*path, f"iteration {i} of {scan.length}"))
            carry = results[: scan.num_carry]
            for row, value in zip(rows, results[scan.num_carry :], strict=True):
                row.append(value)
        return [*carry, *(_stacked(row[::-1] if scan.reverse else row) for row in rows)]

    def _conditional(
        self, equation: Conditional, operands: Sequence[Value], path: tuple[str, ...]
    ) -> list[Value]:
        index = operands[0].array
        if index is None:
            return [UNKNOWN] * len(equation.makes)
        _check_scalar(index, path)
        branch = min(max(int(index), 0), len(equation.branches) - 1)
        return self._run(equation.branches[branch], operands[1:], (*path, f"branch {branch}"))

    def _while(self, equation: While, operands: Sequence[Value], path: tuple[str, ...]) -> list[Value]:
        first = equation.num_condition_consts
        second = first + equation.num_body_consts
        of_condition, of_body = operands[:first], operands[first:second]
        carry = list(operands[second:])
        for i in itertools.count():
            here = (*path, f"iteration {i}")
            (is_on,) = self._run(equation.condition, [*of_condition, *carry], (*here, "condition"))
            if is_on.array is None:
                return [UNKNOWN] * len(equation.makes)
            _check_scalar(is_on.array, here)
            if not is_on.array:
                break
            carry = self._run(equation.body, [*of_body, *carry], here)
        return carry


def _of_finite_elements(evaluated: Evaluated) -> np.ndarray:
    """The positions of the result that are not finite, while the operands there are finite."""
    result = evaluated.results[0]
    if evaluated.source.primitive not in ELEMENTWISE or any(
        operand.shape not in ((), result.shape) for operand in evaluated.operands
    ):
        return np.zeros(result.shape, bool)
    made_here = ~is_finite(result)
    for operand in evaluated.operands:
        made_here &= is_finite(operand)
    return made_here


def _check_scalar(array: np.ndarray, path: Sequence[str]) -> None:
    if array.shape or array.dtype.kind not in "biu":
        raise ValueError(
            f"{text_of(path)} is decided by {array.dtype}{list(array.shape)}, not by one integer"
        )


def text_of(path: Sequence[str]) -> str:
    """The path of an equation as text."""
    return " > ".join(path)


def _reads(equation: Equation) -> Sequence[int]:
    return () if isinstance(equation, Constant) else equation.reads


def _first(values: Sequence[Value]) -> Origin | None:
    """The first origin of several values; ``None`` where they have none."""
    return min((v.origin for v in values if v.origin), key=lambda origin: origin.number, default=None)


def _row(stack: Value, index: int) -> Value:
    """One row of a value that is scanned over."""
    if stack.array is None:
        return UNKNOWN
    row = stack.array[index, ...]
    return Value(row, stack.origin if any(count_nonfinite(row)) else None)


def _stacked(rows: Sequence[Value]) -> Value:
    arrays = [row.array for row in rows if row.array is not None]
    if len(arrays) < len(rows) or not arrays:
        return UNKNOWN
    return Value(np.stack(arrays), _first([row for row in rows if row.origin]))
