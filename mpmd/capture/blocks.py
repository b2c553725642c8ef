"""Writes equations down as blocks of numbered values, into loops, branches and rematerialised functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from mpmd.capture.exports import Exports
from mpmd.compiler.jaxprs.canonical import called
from mpmd.compiler.jaxprs.equations import Atom, is_remat, operands
from mpmd.compiler.jaxprs.scans import scan_operands
from mpmd.compiler.jaxprs.source import line_of
from mpmd.keys import encode, is_key, raw
from mpmd.replay.record import Block, Conditional, Constant, Equation, Scan, Single, Source, While
from mpmd.replay.values import as_bytes, count_nonfinite


def equations_of(jaxpr: Jaxpr, exports: Exports) -> tuple[tuple[Source, ...], Block]:
    """The equations of a task, with their sources; their functions are added to ``exports``."""
    sources: dict[Source, int] = {}
    block = _BlockWriter(sources, exports).block(jaxpr, ())
    return tuple(sources), block


class _BlockWriter:
    """Writes one block.

    Args:
      sources: the number of each source, for all blocks.
    """

    def __init__(self, sources: dict[Source, int], exports: Exports):
        self._sources = sources
        self._exports = exports
        self._numbers: dict[Var, int] = {}
        self._counter = itertools.count()
        self._equations: list[Equation] = []

    def block(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> Block:
        """The block of a function that closes over these values."""
        inputs = tuple(map(self._new, jaxpr.invars))
        self._constants(jaxpr, consts)
        self._add(jaxpr.eqns)
        outputs = tuple(map(self._number, jaxpr.outvars))
        return Block(inputs, tuple(self._equations), outputs)

    def _new(self, var: Var) -> int:
        self._numbers[var] = next(self._counter)
        return self._numbers[var]

    def _number(self, atom: Atom) -> int:
        return self._constant(atom.val, atom) if isinstance(atom, Literal) else self._numbers[atom]

    def _constant(self, value: Any, atom: Atom) -> int:
        """The number of a value that is written in the program, of the type of ``atom``."""
        plain = encode(value) if is_key(atom.aval) else value
        array = np.asarray(plain, raw(atom.aval).dtype)
        number = next(self._counter)
        data = as_bytes(array).tobytes().hex()
        self._equations.append(Constant(str(array.dtype), array.shape, data, number))
        return number

    def _constants(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> None:
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            self._numbers[var] = self._constant(value, var)

    def _add(self, eqns: Sequence[JaxprEqn]) -> None:
        for eqn in eqns:
            if (function := _function(eqn)) is not None:
                self._inline(eqn, function)
            else:
                self._equation(eqn)

    def _inline(self, eqn: JaxprEqn, function: ClosedJaxpr) -> None:
        """The equations of a function that an equation calls, in its place."""
        jaxpr = function.jaxpr
        arguments = list(map(self._number, eqn.invars))
        self._constants(jaxpr, function.consts)
        self._numbers.update(zip(jaxpr.invars, arguments, strict=True))
        self._add(jaxpr.eqns)
        results = list(map(self._number, jaxpr.outvars))
        self._numbers.update(zip(eqn.outvars, results, strict=True))

    def _equation(self, eqn: JaxprEqn) -> None:
        source = Source(eqn.primitive.name, line_of(eqn) or "", str(eqn.source_info.name_stack))
        number = self._sources.setdefault(source, len(self._sources))
        params = eqn.params
        match eqn.primitive.name:
            case "scan" if params["length"]:  # without iterations, only its types say what it stacks
                positions = scan_operands(eqn)
                reads = self._reads(eqn)
                self._equations.append(
                    Scan(
                        source=number,
                        reads=reads,
                        makes=self._makes(eqn),
                        num_consts=positions.consts.stop,
                        num_carry=positions.num_carry,
                        length=params["length"],
                        reverse=bool(params["reverse"]),
                        body=self._body(params["jaxpr"]),
                    )
                )
            case "cond":
                reads = self._reads(eqn)
                branches = tuple(map(self._body, params["branches"]))
                self._equations.append(Conditional(number, reads, self._makes(eqn), branches))
            case "while":
                reads = self._reads(eqn)
                self._equations.append(
                    While(
                        source=number,
                        reads=reads,
                        makes=self._makes(eqn),
                        num_condition_consts=params["cond_nconsts"],
                        num_body_consts=params["body_nconsts"],
                        condition=self._body(params["cond_jaxpr"]),
                        body=self._body(params["body_jaxpr"]),
                    )
                )
            case _:
                eqn = self._with_infinities_read(eqn)
                single = tuple(self._numbers[var] for var in dict.fromkeys(operands(eqn)))
                self._equations.append(
                    Single(
                        source=number,
                        export=self._exports.of(eqn),
                        reads=single,
                        makes=self._makes(eqn),
                    )
                )

    def _with_infinities_read(self, eqn: JaxprEqn) -> JaxprEqn:
        """The equation with literals that are not finite as operands: they explain what it makes of them."""
        invars: list[Atom] = []
        for atom in eqn.invars:
            if isinstance(atom, Literal) and any(count_nonfinite(np.asarray(atom.val, raw(atom.aval).dtype))):
                var = Var(atom.aval)
                self._numbers[var] = self._constant(atom.val, atom)
                invars.append(var)
            else:
                invars.append(atom)
        return eqn.replace(invars=invars)

    def _reads(self, eqn: JaxprEqn) -> tuple[int, ...]:
        return tuple(map(self._number, eqn.invars))

    def _makes(self, eqn: JaxprEqn) -> tuple[int, ...]:
        return tuple(map(self._new, eqn.outvars))

    def _body(self, body: ClosedJaxpr) -> Block:
        return _BlockWriter(self._sources, self._exports).block(body.jaxpr, body.consts)


def _function(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an equation does nothing but call, or compute again for a backward."""
    if is_remat(eqn):
        body = eqn.params["jaxpr"]
        return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
    if eqn.primitive.name == "call_jaxpr":
        return eqn.params["call_jaxpr"]
    return called(eqn)
