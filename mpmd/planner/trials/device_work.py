"""What the equations of a task cost on each device: operations, bytes, sums over devices, temporaries.

An estimate of what XLA makes of them: calls are entered, a chain of elementwise equations is one pass over
memory (a *fusion*), and values are sharded as what they are made of, or else as what is made of them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p, remat_p, scan_p

from mpmd.compiler.jaxprs.cost import has_reduction, is_elementwise, is_fused, is_renamed, is_window
from mpmd.compiler.jaxprs.dimensions import Dimensions, axes_in, follow, follow_into_scan, sharded
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    called,
    is_among,
    is_dropped,
    operands,
    size,
    subjaxprs,
)
from mpmd.compiler.jaxprs.remat import inlined_eqns
from mpmd.compiler.jaxprs.scans import scan_operands
from mpmd.compiler.jaxprs.work import operations

_PRODUCTS = frozenset({dot_general_p, conv_general_dilated_p})


@dataclasses.dataclass(frozen=True)
class DeviceWork:
    """What a device does for a task.

    Attributes:
      operations: multiplications and additions of products, and one for each element of other results.
      nbytes: read from its memory and written to it.
      nbytes_beside: those of them that are read and written by other than products, while none computes.
      summed: for each axis of the mesh, the bytes on the device of values that are summed over the devices
        along it. What is gathered instead counts half of its whole size, as it takes half of the time.
      sums: for each axis, how many values these are.
      temporaries: the most bytes of values that are neither operands nor results, at once.
    """

    operations: float = 0.0
    nbytes: float = 0.0
    nbytes_beside: float = 0.0
    summed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sums: Mapping[str, int] = dataclasses.field(default_factory=dict)
    temporaries: float = 0.0

    def __add__(self, other: DeviceWork) -> DeviceWork:
        """One after the other."""
        return DeviceWork(
            self.operations + other.operations,
            self.nbytes + other.nbytes,
            self.nbytes_beside + other.nbytes_beside,
            _added(self.summed, other.summed),
            _added(self.sums, other.sums),
            max(self.temporaries, other.temporaries),
        )

    def times(self, count: int) -> DeviceWork:
        """As often as that, one after the other."""
        return dataclasses.replace(
            self,
            operations=count * self.operations,
            nbytes=count * self.nbytes,
            nbytes_beside=count * self.nbytes_beside,
            summed={axis: count * nbytes for axis, nbytes in self.summed.items()},
            sums={axis: count * number for axis, number in self.sums.items()},
        )


def _added(some: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    return {axis: some.get(axis, 0) + others.get(axis, 0) for axis in sorted({*some, *others})}


def device_work(
    jaxpr: Jaxpr,
    inputs: Sequence[Dimensions],
    mesh: Mapping[str, int],
    outputs: Sequence[Dimensions | None] | None = None,
    given_constants: Collection[Var] = (),
) -> DeviceWork:
    """What each device does for a jaxpr.

    Args:
      inputs: how the jaxpr's inputs are sharded.
      mesh: the size of each axis. Without axes, the work is that of the whole.
      outputs: how results are to be sharded; ``None`` for those that are as they come.
      given_constants: the inputs that are made where they are read.
    """
    eqns = inlined_eqns(jaxpr.eqns, _body)
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    constants = _constants(eqns, given_constants)
    known = _with_constants(eqns, constants, follow(eqns, known, mesh))
    for atom, wanted in zip(jaxpr.outvars, outputs or (), strict=False):
        if isinstance(atom, Var) and wanted is not None and not any(sharded(atom, known)):
            known[atom] = wanted
    known = _with_addends(jaxpr, eqns, known)
    work = _Fusions(jaxpr, eqns, constants, known, mesh).work()
    for atom, wanted in zip(jaxpr.outvars, outputs or (), strict=False):
        if isinstance(atom, Var) and wanted is not None:
            work += _gathering(atom, sharded(atom, known), wanted, mesh)
    return work


def _constants(eqns: Sequence[JaxprEqn], given: Collection[Var]) -> set[Var]:
    """The given constants, and the values that are made of nothing else and of scalars, such as masks."""
    found = set(given)
    for eqn in eqns:
        if not subjaxprs(eqn) and all(
            isinstance(atom, Literal) or is_among(atom, found) or not aval_of(atom).shape
            for atom in eqn.invars
        ):
            found.update(eqn.outvars)
    return found


def _with_constants(
    eqns: Sequence[JaxprEqn], constants: Collection[Var], known: Mapping[Var, Dimensions]
) -> dict[Var, Dimensions]:
    """What is known of values, and of the constants among them, such as zeros that are scattered into.

    Nothing says how a constant is sharded but what is made of it: so it is, where that has the same shape.
    """
    found = dict(known)
    for eqn in reversed(eqns):
        made = [var for var in eqn.outvars if var in found]
        for atom in eqn.invars if made else ():
            if isinstance(atom, Var) and atom in constants and atom not in found:
                like = next((var for var in made if aval_of(var).shape == aval_of(atom).shape), None)
                found |= {} if like is None else {atom: found[like]}
    return found


def _with_addends(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], known: Mapping[Var, Dimensions]
) -> dict[Var, Dimensions]:
    """What is known of values, and of those that nothing says anything of but their only reader.

    So a gradient is sharded like the accumulator that it is added to, and each device gets its part of the
    sum over devices.
    """
    readers = collections.Counter(atom for eqn in eqns for atom in set(operands(eqn)))
    readers.update(atom for atom in jaxpr.outvars if isinstance(atom, Var))
    fixed = {*jaxpr.invars, *(atom for atom, count in readers.items() if count > 1)}
    found = dict(known)
    for eqn in reversed(eqns):
        wanted = found.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
        if wanted is None or not (is_elementwise(eqn) or eqn.primitive.name == "transpose"):
            continue
        if eqn.primitive.name == "transpose":
            permutation = eqn.params["permutation"]
            wanted = tuple(wanted[permutation.index(d)] for d in range(len(wanted)))
        for atom in operands(eqn):
            if atom not in fixed and atom not in found and len(aval_of(atom).shape) == len(wanted):
                found[atom] = wanted
    return found


def _gathering(atom: Var, found: Dimensions, wanted: Dimensions, mesh: Mapping[str, int]) -> DeviceWork:
    """What it takes that a result is gathered along the axes by which it is not to be sharded."""
    axes = {axis for axis in axes_in(found) - axes_in(wanted) if mesh[axis] > 1}
    left = math.prod(mesh[axis] for axis in axes_in(found) - axes)
    nbytes = size(atom) * getattr(aval_of(atom).dtype, "itemsize", 4) / left
    return DeviceWork(summed=dict.fromkeys(axes, nbytes / 2), sums=dict.fromkeys(axes, 1))


def _body(eqn: JaxprEqn) -> Jaxpr | None:
    """What an equation calls, if it does nothing else."""
    if eqn.primitive is remat_p:
        return eqn.params["jaxpr"]
    inner = called(eqn)
    return inner.jaxpr if inner is not None and not inner.consts else None


def _makes_constants(eqn: JaxprEqn) -> bool:
    """Whether the constants that an equation reads need not be in memory."""
    return is_fused(eqn) or eqn.primitive is scan_p


class _Fusions:
    """Equations without calls, and which of their results are written to memory.

    ``_sources`` has, for each variable, the values in memory that it is computed of: itself, if it is in
    memory. ``_windows`` are parts of values in memory, which their readers read there. ``_last`` has the
    position of the last equation for which a value in memory is read. ``_free`` are constants in no memory:
    fusions make them, and so do loops, in each iteration.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        eqns: Sequence[JaxprEqn],
        constants: Collection[Var],
        known: Mapping[Var, Dimensions],
        mesh: Mapping[str, int],
    ):
        self._eqns, self._known, self._mesh = eqns, known, mesh
        in_memory = {atom for eqn in eqns if not _makes_constants(eqn) for atom in operands(eqn)}
        self._free = {*constants} - in_memory - {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
        self._kept = {atom for atom in (*jaxpr.invars, *jaxpr.outvars) if isinstance(atom, Var)} - self._free
        self._written = set(self._kept)
        self._windows: set[Var] = set()
        for eqn in eqns:
            if is_window(eqn):
                self._windows.update(eqn.outvars)
            elif not is_fused(eqn):
                self._written.update(operands(eqn), eqn.outvars)
            elif has_reduction(eqn):
                self._written.update(eqn.outvars)
        there = set(self._written)
        for eqn in eqns:
            if is_renamed(eqn) and not there.isdisjoint(operands(eqn)):
                self._written.difference_update({*eqn.outvars} - self._kept)
                there.update(eqn.outvars)
        self._written -= self._free
        self._sources: dict[Var, frozenset[Var]] = dict.fromkeys(self._free, frozenset())
        self._last: dict[Var, int] = {}
        for position, eqn in enumerate(eqns):
            read = self._read(operands(eqn))
            self._last |= dict.fromkeys(read, position)
            for var in eqn.outvars:
                is_read_there = var in self._written or var in self._windows
                if var not in self._free:
                    self._sources[var] = frozenset({var}) if is_read_there else read

    def _read(self, variables: Iterable[Var]) -> frozenset[Var]:
        """The values in memory that variables are computed of."""
        return frozenset().union(*(self._sources.get(var, frozenset({var})) for var in variables))

    def work(self) -> DeviceWork:
        """The sum over all equations."""
        total = DeviceWork()
        held = most = 0.0
        live: dict[Var, float] = {}
        leaving: dict[int, list[Var]] = collections.defaultdict(list)
        for position, eqn in enumerate(self._eqns):
            work = self._of(eqn)
            total += work
            for var in leaving.pop(position, ()) if is_fused(eqn) else ():
                held -= live.pop(var, 0.0)  # a fusion can write where it reads
            for var in eqn.outvars:
                if var in self._written and var not in self._kept and not is_dropped(var):
                    live[var] = self._bytes(var)
                    held += live[var]
                    leaving[self._last.get(var, position)].append(var)
            most = max(most, held + work.temporaries)
            for var in leaving.pop(position, ()):
                held -= live.pop(var, 0.0)
        return dataclasses.replace(total, temporaries=most)

    def _of(self, eqn: JaxprEqn) -> DeviceWork:
        if bodies := subjaxprs(eqn):
            return self._of_bodies(eqn, bodies)
        axes = set().union(*(axes_in(sharded(var, self._known)) for var in eqn.outvars))
        summed, moved = _crossing(eqn, [sharded(atom, self._known) for atom in eqn.invars], axes)
        written = [var for var in eqn.outvars if var in self._written and not is_dropped(var)]
        read = self._read(operands(eqn)) if written else ()
        made = sum(map(self._bytes, written))
        crossing = dict.fromkeys(summed, made)
        for axis, atom in moved.items():
            crossing[axis] = crossing.get(axis, 0) + self._bytes(atom) * self._mesh[axis] / 2
        crossing = {axis: nbytes for axis, nbytes in crossing.items() if self._mesh[axis] > 1}
        nbytes = made + sum(map(self._bytes, read))
        return DeviceWork(
            operations=operations(eqn) / math.prod(self._mesh[axis] for axis in axes | summed),
            nbytes=nbytes,
            nbytes_beside=0.0 if eqn.primitive in _PRODUCTS else nbytes,
            summed=crossing,
            sums=dict.fromkeys(crossing, 1),
        )

    def _of_bodies(self, eqn: JaxprEqn, bodies: Sequence[Jaxpr]) -> DeviceWork:
        """A loop, whose number of iterations is one where it is not known, or the larger branch."""
        given = [sharded(atom, self._known) for atom in eqn.invars]
        if eqn.primitive is scan_p:
            [body] = bodies
            positions = scan_operands(eqn)
            found = follow_into_scan(eqn, given, body.eqns, self._mesh)
            inside = [
                sharded(var, found) if i < positions.xs.start else dimensions[1:]
                for i, (var, dimensions) in enumerate(zip(body.invars, given, strict=True))
            ]
            made = [
                dimensions[1:] if i >= positions.num_carry and any(dimensions) else None
                for i, dimensions in enumerate(sharded(var, self._known) for var in eqn.outvars)
            ]
            pairs = zip(body.invars, eqn.invars, strict=True)
            free = {var for var, atom in pairs if is_among(atom, self._free)} - {
                *body.invars[positions.carry]
            }
            return device_work(body, inside, self._mesh, made, free).times(eqn.params["length"])
        works = []
        for body in bodies:
            # The last operands are those of every branch, and the first ones of a loop its constants.
            inside = given[len(given) - len(body.invars) :] if len(body.invars) <= len(given) else given
            fitting = [
                dimensions if len(dimensions) == len(aval_of(var).shape) else ((),) * len(aval_of(var).shape)
                for var, dimensions in zip(body.invars, inside, strict=False)
            ]
            fitting += [((),) * len(aval_of(var).shape) for var in body.invars[len(fitting) :]]
            works.append(device_work(body, fitting, self._mesh))
        return max(works, key=lambda work: (work.operations, work.nbytes))

    def _bytes(self, atom: Atom) -> float:
        """The bytes of a value on each device."""
        if isinstance(atom, Literal):
            return 0.0
        aval = aval_of(atom)
        parts = math.prod(self._mesh[axis] for axis in axes_in(sharded(atom, self._known)))
        return size(atom) * getattr(aval.dtype, "itemsize", 4) / parts


def _crossing(eqn: JaxprEqn, given: Sequence[Dimensions], made: set[str]) -> tuple[set[str], dict[str, Atom]]:
    """The axes over which the results are summed, and those along which a value is gathered or scattered.

    A dimension that a product contracts, or a reduction removes, and that is sharded along an axis means
    that each device has a part of the sum. If the result is sharded along that axis by another dimension,
    the sum is scattered, or, where only one of the operands of a product is sharded so, that is gathered.

    Args:
      given: how operands are sharded.
      made: the axes that shard the results.
    """
    gone: list[tuple[int, str]] = []
    name: str = eqn.primitive.name
    numbers: Any = eqn.params.get("dimension_numbers")
    if name == "dot_general":
        contracted, _ = numbers
        gone = [
            (position, axis)
            for position, dimensions in enumerate(contracted)
            for d in dimensions
            for axis in given[position][d]
        ]
    elif name.startswith("reduce_") and "axes" in eqn.params:
        gone = [(0, axis) for d in eqn.params["axes"] for axis in given[0][d]]
    elif name == "gather":
        gone = [(0, axis) for d in numbers.start_index_map for axis in given[0][d]]
    elif name == "scatter-add":
        gone = [(2, axis) for dimensions in given[2] for axis in dimensions if axis not in made]
    elif name == "conv_general_dilated":
        gone = [(0, axis) for axis in given[0][numbers.lhs_spec[1]]]
        gone += [(1, axis) for axis in given[1][numbers.rhs_spec[1]]]
    summed = {axis for _, axis in gone if axis not in made}
    moved: dict[str, Atom] = {}
    for position, axis in gone:
        if axis in made:
            is_sum = name.startswith("reduce_") or (1 - position, axis) in gone
            moved[axis] = eqn.outvars[0] if is_sum else eqn.invars[position]
    return summed, moved
