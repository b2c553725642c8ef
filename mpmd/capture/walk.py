"""Evaluates the equations of a task one by one, and follows NaNs and infinities to where they are made.

``walk`` takes the equations of a task with the values of its operands, and returns an ``Evaluation``.
``CaptureWriter`` calls it in the driver, which has the equations with the user's lines. Each equation runs on
JAX's default device, whatever devices the group has; the function of a ``shard_map`` takes the number of
devices that the group has.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, Mesh

from mpmd.compiler.jaxprs.canonical import called
from mpmd.compiler.jaxprs.equations import Atom, all_eqns, closed, is_remat, make_jaxpr, operands
from mpmd.compiler.jaxprs.rules import ELEMENTWISE
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.source import line_of
from mpmd.compiler.lower.executables import python_calls, task_function
from mpmd.compiler.lower.fingerprint import fingerprint
from mpmd.keys import encode, is_key, raw
from mpmd.replay.record import Evaluation, Origin, Range, Source
from mpmd.replay.values import count_nonfinite, is_inexact
from mpmd.sharding import to_sharding, within

_IDENTITIES = frozenset({"sharding_constraint", "layout_constraint", "reshard", "mesh_cast"})
"""Equations about the placement of a value, which the value does not depend on."""

_MOST_OTHERS = 10

_MOST_SECONDS = 30
"""The time for the equations of one task: the step's caller gets the error of the task afterwards."""

Path = tuple[str, ...]
"""An equation, and the loops, branches and calls around it."""


class Value(NamedTuple):
    """A value of an equation on the host.

    Attributes:
      array: ``None`` where it depends on a lost operand, or on an equation that could not be evaluated.
      origin: the equation that made the NaNs or infinities in it; ``None`` if it is finite, or if an operand
        of the task or a constant of the program explains them.
    """

    array: np.ndarray | None
    origin: Origin | None = None


UNKNOWN = Value(None)


def walk(
    jaxpr: Jaxpr, arrays: Sequence[np.ndarray | None], submesh: AbstractMesh, is_passed_on: Sequence[bool]
) -> Evaluation:
    """Evaluates a task, for ``_MOST_SECONDS`` and the equation that is then under way.

    Args:
      arrays: the operands; ``None`` for a lost one. Typed keys are the integers inside.
      is_passed_on: for each result, whether another task, stage or the step's caller gets it.
    """
    walker = _Walker(submesh)
    results = walker.run(closed(jaxpr), [Value(array) for array in arrays], ())
    ranks: dict[tuple[bool, bool, int], Origin] = {}
    for value, passed_on in zip(results, is_passed_on, strict=True):
        if value.array is not None and value.origin is not None:
            has_nans = count_nonfinite(value.array)[0] > 0
            ranks[not passed_on, not has_nans, value.origin.number] = value.origin
    first = ranks[min(ranks)] if ranks else next(iter(walker.origins), None)
    others = [origin for origin in walker.origins if origin is not first]
    return Evaluation(
        first=first,
        reaches_result=bool(ranks),
        others=tuple(others[:_MOST_OTHERS]),
        skipped=tuple(walker.skipped),
        count=walker.count,
    )


class _Walker:
    """Evaluates equations, into loops, branches, calls and rematerialised functions.

    Attributes:
      count: the number of equations that were evaluated, each as often as it was.
      origins: the equations that have made a NaN or an infinity, also one that no result has.
      skipped: the equations that could not be evaluated, each with the reason; last the equation before
        which the time ended, if it has.
    """

    def __init__(self, submesh: AbstractMesh):
        self._submesh = submesh
        self._end = time.monotonic() + _MOST_SECONDS
        self._has_stopped = False
        self._functions: dict[Hashable, Callable] = {}
        self._compiled_once = functools.cache(self._compiled)
        self.count = 0
        self.origins: list[Origin] = []
        self.skipped: dict[tuple[Source, str], None] = {}

    def run(self, function: ClosedJaxpr, arguments: Sequence[Value], path: Path) -> list[Value]:
        jaxpr = function.jaxpr
        table = dict(zip(jaxpr.invars, arguments, strict=True))
        table |= {
            var: _constant(value, var) for var, value in zip(jaxpr.constvars, function.consts, strict=True)
        }
        last_uses = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in operands(eqn)}
        last_uses |= {atom: len(jaxpr.eqns) for atom in jaxpr.outvars if isinstance(atom, Var)}

        def value_of(atom: Atom) -> Value:
            return _constant(atom.val, atom) if isinstance(atom, Literal) else table[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            here = (*path, f"equation {i} {eqn.primitive}")
            results = self._evaluate(eqn, list(map(value_of, eqn.invars)), here)
            table.update(zip(eqn.outvars, results, strict=True))
            for var in operands(eqn):  # a stage's values need not all fit into memory
                if last_uses[var] == i:
                    table.pop(var, None)
        return list(map(value_of, jaxpr.outvars))

    def _stops(self, eqn: JaxprEqn) -> bool:
        """Tells whether the time has ended before an equation, or before the next iteration of a loop."""
        if not self._has_stopped and time.monotonic() >= self._end:
            self._has_stopped = True
            reason = f"stopped after {_MOST_SECONDS} s; what follows was not evaluated either"
            self.skipped[_source(eqn), reason] = None
        return self._has_stopped

    def _evaluate(self, eqn: JaxprEqn, values: list[Value], path: Path) -> Sequence[Value]:
        if self._stops(eqn):
            return [UNKNOWN] * len(eqn.outvars)
        if eqn.primitive.name in _IDENTITIES:
            return values
        if (function := _called_function(eqn)) is not None:
            return self.run(function, values, path)
        match eqn.primitive.name:
            case "scan" if eqn.params["length"]:  # without iterations, only its types say what it stacks
                return self._scan(eqn, values, path)
            case "cond":
                return self._conditional(eqn, values, path)
            case "while":
                return self._while(eqn, values, path)
        return self._single(eqn, values, path)

    def _single(self, eqn: JaxprEqn, values: Sequence[Value], path: Path) -> list[Value]:
        unknown = [UNKNOWN] * len(eqn.outvars)
        source = _source(eqn)
        if any(python_calls([eqn])):
            self.skipped[source, "it calls Python"] = None
            return unknown
        arrays = [value.array for value in values if value.array is not None]
        if len(arrays) < len(values):
            return unknown
        try:
            results = list(map(np.asarray, self._compiled_once(eqn)(*arrays)))
        except Exception as error:  # whatever it is, the other equations may name the fault
            self.skipped[source, f"{type(error).__name__}: {error}".splitlines()[0]] = None
            return unknown
        origin = self._origin(source, values, results, path)
        self.count += 1
        return [_value(result, origin) for result in results]

    def _compiled(self, eqn: JaxprEqn) -> Callable:
        # Variables for literals, and for results that nothing reads, which a jaxpr cannot have as results.
        invars, outvars = ([Var(atom.aval) for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
        eqn = eqn.replace(invars=[*invars], outvars=outvars)
        jaxpr = make_jaxpr(invars, [eqn], outvars)
        key = fingerprint(jaxpr)
        if key not in self._functions:
            function = task_function(jaxpr, eqn.primitive.name)
            compiled = self._on_all_devices(function) if _has_shard_map(eqn) else jax.jit(function)
            self._functions[key] = compiled
        return self._functions[key]

    def _on_all_devices(self, function: Callable) -> Callable:
        """Compiles a function for as many devices as the group has, which all get whole arrays."""
        size, devices = self._submesh.size, jax.devices()
        if len(devices) < size:
            raise ValueError(f"it takes the {size} devices of its group, and JAX has {len(devices)} here")
        mesh = Mesh(
            np.array(devices[:size]).reshape(self._submesh.axis_sizes),
            self._submesh.axis_names,
            self._submesh.axis_types,
        )
        replicated = to_sharding((), mesh)
        jitted = jax.jit(function, in_shardings=replicated, out_shardings=replicated)

        def call(*arrays: np.ndarray) -> Sequence[jax.Array]:
            with within(self._submesh):
                return jitted(*arrays)

        return call

    def _origin(
        self, source: Source, values: Sequence[Value], results: Sequence[np.ndarray], path: Path
    ) -> Origin | None:
        """Returns the equation that made the NaNs and infinities in results.

        ``None`` if all are finite, or if an operand of the task or a constant explains them.
        """
        num_nans, num_infs = np.sum([count_nonfinite(result) for result in results] or [(0, 0)], axis=0)
        if not num_nans and not num_infs:
            return None
        counts = [(value, count_nonfinite(value.array)) for value in values if value.array is not None]
        with_nans = [value for value, (nans, _) in counts if nans]
        with_infs = [value for value, (_, infs) in counts if infs]
        explaining = _first(with_nans or with_infs)
        # NaNs of a constant infinity are made here: it may be a mask, which does no harm by itself.
        is_explained = bool(with_nans or (with_infs and (not num_nans or explaining is not None)))
        if is_explained and explaining is None:  # by an input or a constant, but perhaps not all elements
            is_made_here = _of_finite_elements(source, values, results[0])
            is_explained = not is_made_here.any()
            num_nans = 0 if is_explained else np.isnan(results[0][is_made_here]).sum()
        if is_explained:
            return explaining
        origin = Origin(
            kind="NaN" if num_nans else "infinity",
            number=self.count,
            path=path,
            source=source,
            operands=tuple(range_of(value.array) for value in values if value.array is not None),
            results=tuple(map(range_of, results)),
        )
        self.origins.append(origin)
        return origin

    def _scan(self, eqn: JaxprEqn, values: Sequence[Value], path: Path) -> list[Value]:
        scan, length = Scan.of(eqn), eqn.params["length"]
        consts, carry, stacks = (list(values[each]) for each in (scan.consts, scan.carry, scan.xs))
        rows: list[list[Value]] = []
        iterations = range(length)
        for i in reversed(iterations) if eqn.params["reverse"] else iterations:
            if self._stops(eqn):
                return [UNKNOWN] * len(eqn.outvars)
            arguments = [*consts, *carry, *(_row(stack, i) for stack in stacks)]
            results = self.run(eqn.params["jaxpr"], arguments, (*path, f"iteration {i} of {length}"))
            carry = results[: scan.num_carry]
            rows.append(results[scan.num_carry :])
        if eqn.params["reverse"]:
            rows.reverse()
        return [*carry, *map(_stacked, zip(*rows, strict=True))]

    def _conditional(self, eqn: JaxprEqn, values: Sequence[Value], path: Path) -> list[Value]:
        branches = eqn.params["branches"]
        if values[0].array is None:
            return [UNKNOWN] * len(eqn.outvars)
        branch = min(max(int(values[0].array), 0), len(branches) - 1)
        return self.run(branches[branch], values[1:], (*path, f"branch {branch}"))

    def _while(self, eqn: JaxprEqn, values: Sequence[Value], path: Path) -> list[Value]:
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        of_condition, of_body, carry = values[:first], values[first:second], list(values[second:])
        for i in itertools.count():
            here = (*path, f"iteration {i}")
            condition = [*of_condition, *carry]
            (is_on,) = self.run(eqn.params["cond_jaxpr"], condition, (*here, "condition"))
            if is_on.array is None or self._stops(eqn):
                return [UNKNOWN] * len(eqn.outvars)
            if not is_on.array:
                break
            carry = self.run(eqn.params["body_jaxpr"], [*of_body, *carry], here)
        return carry


def range_of(array: np.ndarray) -> Range:
    wide = np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)
    wide = wide[np.isfinite(wide)]
    low, high = (float(wide.min()), float(wide.max())) if wide.size else (None, None)
    return Range(str(array.dtype), array.shape, low, high, *count_nonfinite(array))


def _source(eqn: JaxprEqn) -> Source:
    return Source(eqn.primitive.name, line_of(eqn) or "", str(eqn.source_info.name_stack))


def _value(array: np.ndarray, origin: Origin | None) -> Value:
    return Value(array, origin if any(count_nonfinite(array)) else None)


def _constant(value: Any, atom: Atom) -> Value:
    return Value(np.asarray(encode(value) if is_key(atom.aval) else value, raw(atom.aval).dtype))


def _called_function(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the function that an equation only calls, or recomputes for a backward; else ``None``."""
    if is_remat(eqn):
        return closed(eqn.params["jaxpr"])
    if eqn.primitive.name == "call_jaxpr":
        return eqn.params["call_jaxpr"]
    return called(eqn)


def _has_shard_map(eqn: JaxprEqn) -> bool:
    return any(each.primitive.name == "shard_map" for each in all_eqns([eqn]))


def _of_finite_elements(source: Source, values: Sequence[Value], result: np.ndarray) -> np.ndarray:
    """Returns the positions at which the result is not finite, although the operands there are."""
    arrays = [value.array for value in values if value.array is not None]
    if source.primitive not in ELEMENTWISE or any(a.shape not in ((), result.shape) for a in arrays):
        return np.zeros(result.shape, bool)
    is_made_here = ~_is_finite(result)
    for array in arrays:
        is_made_here &= _is_finite(array)
    return is_made_here


def _is_finite(array: np.ndarray) -> np.ndarray:
    return np.isfinite(array) if is_inexact(array) else np.ones(array.shape, bool)


def _first(values: Sequence[Value]) -> Origin | None:
    return min((v.origin for v in values if v.origin), key=lambda origin: origin.number, default=None)


def _row(stack: Value, index: int) -> Value:
    if stack.array is None:
        return UNKNOWN
    return _value(stack.array[index, ...], stack.origin)


def _stacked(rows: Sequence[Value]) -> Value:
    arrays = [row.array for row in rows if row.array is not None]
    if len(arrays) < len(rows):
        return UNKNOWN
    return Value(np.stack(arrays), _first([row for row in rows if row.origin]))
