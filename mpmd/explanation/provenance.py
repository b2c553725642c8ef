"""Finds the lines of the user's program that the equations of a task come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import makers_of, operands, size, subjaxprs
from mpmd.compiler.jaxprs.source import SourceFrame, origin_of
from mpmd.compiler.jaxprs.work import operations
from mpmd.explanation.tasks import FunctionShare
from mpmd.explanation.uses import SourceLine
from mpmd.util.grouping import grouped


class TaskEquations:
    def __init__(self, jaxpr: Jaxpr):
        self._jaxpr = jaxpr
        self._position = {var: i for i, var in enumerate(jaxpr.invars)}
        self._maker = makers_of(jaxpr.eqns)
        self._readers = grouped((var, eqn) for eqn in jaxpr.eqns for var in dict.fromkeys(operands(eqn)))

    def lines_reading(self, position: int) -> tuple[SourceLine, ...]:
        """The lines that read an input; if ``treduce`` slices the input, the lines that read the slice."""
        lines: dict[SourceLine, None] = {}
        pending = [self._jaxpr.invars[position]]
        for var in pending:  # grows
            for eqn in self._readers.get(var, ()):
                lines.update(dict.fromkeys(lines_of(eqn)))
                if not lines_of(eqn):
                    pending.extend(out for out in eqn.outvars if out not in pending)
        return tuple(lines)

    def copies_of(self, position: int) -> list[int]:
        """The outputs that are copies of an input which the compiler added, such as a gathered weight."""
        copies = {
            var
            for eqn in self._readers.get(self._jaxpr.invars[position], ())
            if eqn.primitive.name.startswith("copy") and not lines_of(eqn)
            for var in eqn.outvars
        }
        return [i for i, var in enumerate(self._jaxpr.outvars) if var in copies]

    def lines_making(self, position: int) -> tuple[SourceLine, ...]:
        """The line that makes an output; if the compiler added the output, the line of its operands."""
        for var in self._traced_back(position):
            if var in self._maker and (lines := lines_of(self._maker[var])):
                return lines
        return ()

    def inputs_of(self, position: int) -> tuple[int, ...]:
        origins = self._traced_back(position)
        return tuple(self._position[var] for var in origins if var in self._position)

    def made_of(self, position: int) -> tuple[list[int], list[JaxprEqn]]:
        """The values of the output's size from which an output is computed.

        Returns: the positions of inputs, and the equations whose operands all have other sizes.
        """
        elements = size(self._jaxpr.outvars[position])
        inputs: list[int] = []
        first: list[JaxprEqn] = []
        for var in self._traced_back(position, elements):
            if var in self._position:
                inputs.append(self._position[var])
            elif all(size(operand) != elements for operand in operands(self._maker[var])):
                first.append(self._maker[var])
        return inputs, first

    def _traced_back(self, position: int, elements: int | None = None) -> Iterator[Var]:
        """Yields an output, its operands, their operands, and so on.

        Where ``elements`` is a number, operands of another size are left out, unless they are the parts of a
        sum that the compiler adds after the loop.
        """
        pending: list[Var] = [self._jaxpr.outvars[position]]  # type: ignore[list-item]
        seen = set(pending)
        for var in pending:  # grows
            yield var
            if var in self._maker:
                eqn = self._maker[var]
                is_any = elements is None or (eqn.primitive.name == "reduce_sum" and not lines_of(eqn))
                new = [v for v in operands(eqn) if v not in seen and (is_any or size(v) == elements)]
                seen.update(new)
                pending.extend(dict.fromkeys(new))

    def functions(self) -> tuple[FunctionShare, ...]:
        work = grouped(
            (line and (line.file, line.function, line.callee), (line, count))
            for line, count in _work(self._jaxpr.eqns)
        )
        shares = [
            FunctionShare(min(filter(None, lines), default=None), len(lines), sum(counts))
            for lines, counts in (zip(*of_function, strict=True) for of_function in work.values())
        ]
        return tuple(sorted(shares, key=lambda share: -share.operations))


def _work(
    eqns: Iterable[JaxprEqn], times: int = 1, caller: SourceLine | None = None
) -> Iterator[tuple[SourceLine | None, int]]:
    for eqn in eqns:
        line = _line(eqn) or caller
        inner = subjaxprs(eqn)
        for jaxpr in inner:
            yield from _work(jaxpr.eqns, times * eqn.params.get("length", 1), line)
        if not inner:
            yield line, times * operations(eqn)


def lines_of(eqn: JaxprEqn) -> tuple[SourceLine, ...]:
    """The user's lines that an equation comes from: its own line, or the lines of nested equations."""
    if line := _line(eqn):
        return (line,)
    inner = (nested for jaxpr in subjaxprs(eqn) for nested in jaxpr.eqns)
    return tuple(dict.fromkeys(line for nested in inner for line in lines_of(nested)))


def _line(eqn: JaxprEqn) -> SourceLine | None:
    origin = origin_of(eqn)
    if origin is None:
        return None
    line = origin.line
    called = origin.called or (line if line.is_of_library else None)
    callee = ".".join((called.package, *_functions_of(called))) if called else ""
    return SourceLine(line.file_name, line.line_num, _functions_of(line)[-1], callee)


def _functions_of(frame: SourceFrame) -> list[str]:
    """Returns the names of the functions around a function, and its own; lambdas have no names."""
    names = frame.function_name.split(".<locals>.")
    return [name for name in names if not name.startswith("<")] or names[-1:]
