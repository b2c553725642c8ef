"""Costs of a task's equations on each device: operations, bytes, all-reduces, temporaries.

They estimate the program that XLA makes: a chain of elementwise equations is one pass over memory (a
*fusion*), also within a rematerialised function, and values are sharded like their operands, or else like
their results.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import scan_p

from mpmd.compiler.jaxprs.cost import is_fused
from mpmd.compiler.jaxprs.equations import (
    Atom,
    aval_of,
    is_among,
    is_dropped,
    operands,
    size,
    subjaxprs,
)
from mpmd.compiler.jaxprs.kernels import NOTHING_AROUND, Around, call_work, kernel_around, kernel_values
from mpmd.compiler.jaxprs.remat import without_remat
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.sharded_dimensions import (
    ShardedDimensions,
    follow,
    follow_back,
    follow_inside,
    sharded,
    without,
)
from mpmd.compiler.jaxprs.work import PRODUCTS, operations, product_kind
from mpmd.ir.specs import axes_of
from mpmd.planner.all_reduces import NO_ALL_REDUCES, AllReduces, merged_sums
from mpmd.planner.curves import ProductWork
from mpmd.planner.fusions import Fusions
from mpmd.planner.trials.exchanges import crossing_axes, moving_constraints
from mpmd.planner.trials.work_on_device import DeviceWork


def device_work(
    jaxpr: Jaxpr,
    inputs: Sequence[ShardedDimensions],
    mesh: Mapping[str, int],
    outputs: Sequence[ShardedDimensions | None] | None = None,
    free_inputs: Collection[Var] = (),
    flash_attention: bool = False,
    around: Around = NOTHING_AROUND,
    residuals: Collection[Var] = (),
) -> tuple[DeviceWork, list[ShardedDimensions]]:
    """Estimates the work of each device for a jaxpr. Also returns the shardings of results, as followed.

    Args:
      inputs: the sharding of the jaxpr's inputs.
      mesh: the size of each axis. Without axes, one device does the work of the whole jaxpr.
      outputs: the required sharding of results; ``None`` for a result whose sharding is free.
      free_inputs: the constant inputs that no memory holds: each reader computes them.
      flash_attention: whether ``jax.nn.dot_product_attention`` is a kernel.
      around: the surroundings of a body.
      residuals: inputs and results that the equations of a kernel keep, but the kernel itself does not.
    """
    eqns = without_remat(jaxpr.eqns)
    followed = follow(eqns, dict(zip(jaxpr.invars, inputs, strict=True)), mesh)
    constants = _constants(eqns, free_inputs)
    known = _with_constants(eqns, constants, followed)
    for atom, required in zip(jaxpr.outvars, outputs or (), strict=False):
        if isinstance(atom, Var) and required is not None and not any(sharded(atom, known)):
            known[atom] = required
    known = _with_addends(jaxpr, eqns, known)
    arounds = [kernel_around(eqn, around, flash_attention) for eqn in eqns]
    work = _Equations(jaxpr, eqns, constants, known, mesh, arounds, flash_attention, residuals).work()
    for atom, required in zip(jaxpr.outvars, outputs or (), strict=False):
        if isinstance(atom, Var) and required is not None and atom not in residuals:
            work += _gathering(atom, sharded(atom, known), required, mesh)
    return work, [sharded(atom, followed) for atom in jaxpr.outvars]


def _constants(eqns: Sequence[JaxprEqn], known: Collection[Var]) -> set[Var]:
    """The constants, and the values that are computed from these and scalars alone, such as masks."""
    constants = set(known)
    for eqn in eqns:
        if not subjaxprs(eqn) and all(
            isinstance(atom, Literal) or is_among(atom, constants) or not aval_of(atom).shape
            for atom in eqn.invars
        ):
            constants.update(eqn.outvars)
    return constants


def _with_constants(
    eqns: Sequence[JaxprEqn], constants: Collection[Var], known: Mapping[Var, ShardedDimensions]
) -> dict[Var, ShardedDimensions]:
    """Adds the shardings of constants, such as zeros into which an equation scatters, to the known
    shardings.

    A constant is sharded like the first result computed from it that has its shape.
    """
    extended = dict(known)
    for eqn in reversed(eqns):
        results = [var for var in eqn.outvars if var in extended]
        for atom in eqn.invars if results else ():
            if isinstance(atom, Var) and atom in constants and atom not in extended:
                like = next((var for var in results if aval_of(var).shape == aval_of(atom).shape), None)
                extended |= {} if like is None else {atom: extended[like]}
    return extended


def _with_addends(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], known: Mapping[Var, ShardedDimensions]
) -> dict[Var, ShardedDimensions]:
    """Adds the shardings of values that only their single reader determines to the known shardings.

    A gradient is sharded like the accumulator to which it is added, so each device gets its part of the sum
    over devices.
    """
    readers = collections.Counter(atom for eqn in eqns for atom in set(operands(eqn)))
    readers.update(atom for atom in jaxpr.outvars if isinstance(atom, Var))
    several = (atom for atom, count in readers.items() if count > 1)
    return follow_back(eqns, known, {*known, *jaxpr.invars, *several})


def _gathering(
    atom: Var, known: ShardedDimensions, required: ShardedDimensions, mesh: Mapping[str, int]
) -> DeviceWork:
    """The work to gather a result along the axes by which it is sharded and must not be."""
    axes = {axis for axis in axes_of(known) - axes_of(required) if mesh[axis] > 1}
    left = math.prod(mesh[axis] for axis in axes_of(known) - axes)
    nbytes = size(atom) * getattr(aval_of(atom).dtype, "itemsize", 4) / left
    return DeviceWork(all_reduces=dict.fromkeys(axes, AllReduces(nbytes / 2, 1, moved=nbytes / 2)))


def _makes_constants(eqn: JaxprEqn) -> bool:
    """Whether the constants that an equation reads need not be in memory."""
    return is_fused(eqn) or eqn.primitive is scan_p


class _Equations:
    """The equations of a task or of a body, with their fusions.

    ``_free`` are constants in no memory, which fusions compute, and loops in each iteration. ``_products``
    are results of products, and ``_sums`` of additions of products to accumulators.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        eqns: Sequence[JaxprEqn],
        constants: Collection[Var],
        known: Mapping[Var, ShardedDimensions],
        mesh: Mapping[str, int],
        arounds: Sequence[Around],
        flash_attention: bool,
        residuals: Collection[Var],
    ):
        self._eqns, self._known, self._mesh = eqns, known, mesh
        self._arounds, self._flash_attention = arounds, flash_attention
        read_in_memory = {atom for eqn in eqns if not _makes_constants(eqn) for atom in operands(eqn)}
        results = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
        self._free = {*constants} - read_in_memory - results
        self._residuals = {*residuals}
        self._kept = {*jaxpr.invars, *results} - self._free - self._residuals
        self._gathers, self._scatters = moving_constraints(eqns, known, mesh, self._kept)
        moving = {*self._gathers, *self._gathers.values(), *self._scatters.values()} - self._free
        of_kernels = kernel_values(
            ((around.kernel, operands(eqn), eqn.outvars) for eqn, around in zip(eqns, arounds, strict=True)),
            self._kept,
        )
        equations = [(eqn, operands(eqn), eqn.outvars) for eqn in eqns]
        of_kernels = of_kernels._replace(inside=of_kernels.inside | self._residuals)
        self._fusions = Fusions.of(equations, {*self._kept, *moving}, of_kernels, self._free)
        readers = collections.Counter(atom for eqn in eqns for atom in {*operands(eqn)})
        accumulators = {var for var in jaxpr.invars if readers[var] == 1}
        self._products, self._sums = set[Var](), set[Var]()
        self._summed: dict[str, set[Var]] = {}
        self._scattered: dict[str, set[Var]] = {}
        for eqn, read in zip(eqns, self._fusions.reads, strict=True):
            self._add_products_and_sums(eqn, read, accumulators)

    def work(self) -> DeviceWork:
        works = [*map(self._of, self._eqns, self._fusions.reads, self._arounds)]
        most = self._fusions.most_held(self._kept, self._bytes, (work.temporaries for work in works))
        of_eqns = [
            (eqn, [atom if isinstance(atom, Var) else None for atom in eqn.invars], eqn.outvars, 1)
            for eqn in self._eqns
        ]
        merged = {
            axis: merged_sums(of_eqns, self._crossing(axis), self._kept)
            for axis in {**self._summed, **self._scattered}
        }
        saved = DeviceWork(
            all_reduces={axis: saving for axis, saving in merged.items() if saving.merged_number}
        )
        return dataclasses.replace(sum(works, saved), temporaries=most)

    def _crossing(self, axis: str) -> dict[Var, AllReduces]:
        """The values that are summed along an axis, or scattered, with their all-reduces."""
        summed, scattered = self._summed.get(axis, ()), self._scattered.get(axis, ())
        whole = {var: AllReduces(self._bytes(var), 1.0) for var in summed}
        return whole | {var: self._moving(var, axis, 0.5) for var in scattered}

    def _of(self, eqn: JaxprEqn, read: frozenset[Var], around: Around) -> DeviceWork:
        if bodies := subjaxprs(eqn):
            return self._of_bodies(eqn, bodies, around)
        if call_work(eqn) is not None:
            return self._of_call(eqn)
        kernel = around.kernel
        axes = set().union(*(axes_of(sharded(var, self._known)) for var in eqn.outvars))
        summed, moved = crossing_axes(eqn, [sharded(atom, self._known) for atom in eqn.invars], axes)
        summed &= self._mesh.keys()  # a shard_map may have other axes
        halves = self._moved_by_constraints(eqn, summed)
        moved |= halves
        computed_by = axes | summed
        summed -= moved.keys()
        written = [var for var in eqn.outvars if var in self._fusions.written and not is_dropped(var)]
        written_bytes = sum(map(self._bytes, written))
        for axis in summed:
            self._summed.setdefault(axis, set()).update(written)
        all_reduces = dict.fromkeys(summed, AllReduces(written_bytes, 1))
        for axis, atom in moved.items():
            all_reduces[axis] = self._moving(atom, axis, 0.5 if axis in halves else 1)
        nbytes = written_bytes + (sum(map(self._bytes, read)) if written else 0.0)
        computed = operations(eqn) / math.prod(self._mesh[axis] for axis in computed_by)
        if kernel is not None:
            computed *= kernel.factor
            nbytes *= kernel.bytes_factor
        kind = None
        if computed:  # a callback, which computes nothing, may have no result
            dimensions = sharded(eqn.outvars[0], self._known)
            parts = [math.prod(self._mesh[axis] for axis in axes) for axes in dimensions]
            kind = product_kind(eqn, parts, kernel is not None)
        return DeviceWork(
            operations=computed,
            nbytes=nbytes,
            nbytes_beside=0.0 if eqn.primitive.name in PRODUCTS else nbytes,
            all_reduces={axis: of_axis for axis, of_axis in all_reduces.items() if self._mesh[axis] > 1},
            kernels=float(bool(written)),
            accumulated=nbytes if self._sums & {*written} else 0.0,
            products={} if kind is None else {kind: ProductWork(computed, 1.0)},
        )

    def _add_products_and_sums(self, eqn: JaxprEqn, read: frozenset[Var], accumulators: set[Var]) -> None:
        """Adds results of ``eqn`` to ``_products`` and ``_sums``, which have constrained results, too."""
        name = eqn.primitive.name
        constrained = {*operands(eqn)} if name == "sharding_constraint" else set[Var]()
        if name in PRODUCTS or constrained & self._products:
            self._products.update(eqn.outvars)
        is_addition = name in ("add", "add_any") and len(read) == 2
        if constrained & self._sums or (is_addition and self._products & read and accumulators & read):
            self._sums.update(eqn.outvars)

    def _moved_by_constraints(self, eqn: JaxprEqn, summed: Collection[str]) -> dict[str, Atom]:
        """For axes, the parts of values that are gathered by a constraint, or scattered before one."""
        moved: dict[str, Atom] = {}
        for var in eqn.outvars:
            if operand := self._gathers.get(var):
                axes = axes_of(sharded(operand, self._known)) - axes_of(sharded(var, self._known))
                moved |= dict.fromkeys(axes, operand)
            if part := self._scatters.get(var):
                for axis in axes_of(sharded(part, self._known)) & {*summed}:
                    moved[axis] = part
                    self._scattered.setdefault(axis, set()).add(part)
        return moved

    def _of_call(self, eqn: JaxprEqn) -> DeviceWork:
        """The work of a kernel that ``mpmd.cost`` describes. It gathers dimensions that it cannot divide."""
        work = call_work(eqn)
        assert work is not None, "an equation with the operands of a kernel has its work"
        divided, gathered = set[str](), dict[str, AllReduces]()
        for atom, whole in zip(eqn.invars, eqn.params["whole"], strict=True):
            for d, axes in enumerate(sharded(atom, self._known)):
                if d not in whole:
                    divided.update(axes)
                    continue
                for axis in axes:
                    moving = self._moving(atom, axis, 1)
                    gathered[axis] = gathered.get(axis, NO_ALL_REDUCES).plus(moving)._replace(number=1)
        parts = math.prod(self._mesh[axis] for axis in divided)
        return DeviceWork(
            operations=work.operations / parts,
            nbytes=work.nbytes / parts,
            all_reduces=gathered,
        )

    def _of_bodies(self, eqn: JaxprEqn, bodies: Sequence[Jaxpr], around: Around) -> DeviceWork:
        """The work of a loop, or of the larger branch. A loop of unknown length has one iteration."""
        divided = eqn.params.get("newly_manual_axes", ())  # a shard_map's body has a device's values
        shardings = [without(sharded(atom, self._known), divided) for atom in eqn.invars]
        if eqn.primitive is scan_p:
            return self._of_scan(eqn, shardings, around)
        works = []
        for body in bodies:
            # The last operands are those of every branch, and the first ones of a loop its constants.
            skipped = max(0, len(shardings) - len(body.invars))
            inside = [
                dimensions if len(dimensions) == len(aval_of(var).shape) else ((),) * len(aval_of(var).shape)
                for var, dimensions in zip(body.invars, shardings[skipped:], strict=False)
            ]
            inside += [((),) * len(aval_of(var).shape) for var in body.invars[len(inside) :]]
            works.append(self._of_body(body, inside, around))
        return max(works, key=lambda work: (work.operations, work.nbytes))

    def _of_body(
        self, body: Jaxpr, inside: Sequence[ShardedDimensions], around: Around, **known: Any
    ) -> DeviceWork:
        work, _ = device_work(
            body, inside, self._mesh, flash_attention=self._flash_attention, around=around, **known
        )
        return work

    def _of_scan(self, eqn: JaxprEqn, shardings: Sequence[ShardedDimensions], around: Around) -> DeviceWork:
        positions = Scan.of(eqn)
        followed = follow_inside(eqn, shardings, self._mesh)
        assert followed is not None, "a scan has a body"
        body, within = followed
        inside = [
            sharded(var, within) if i < positions.xs.start else dimensions[1:]
            for i, (var, dimensions) in enumerate(zip(body.invars, shardings, strict=True))
        ]
        stacked = [
            dimensions[1:] if i >= positions.num_carry and any(dimensions) else None
            for i, dimensions in enumerate(sharded(var, self._known) for var in eqn.outvars)
        ]
        pairs = zip(body.invars, eqn.invars, strict=True)
        free = {var for var, atom in pairs if is_among(atom, self._free)} - {*body.invars[positions.carry]}
        handed = [*zip(body.invars, eqn.invars, strict=True), *zip(body.outvars, eqn.outvars, strict=True)]
        residuals = {
            var for var, atom in handed if isinstance(var, Var) and is_among(atom, self._residuals)
        } - {*body.invars[positions.carry]}
        work = self._of_body(body, inside, around, outputs=stacked, free_inputs=free, residuals=residuals)
        return work.times(eqn.params["length"])

    def _moving(self, atom: Atom, axis: str, number: float) -> AllReduces:
        """The exchange of a value that is gathered or scattered along an axis."""
        nbytes = self._bytes(atom) * self._mesh[axis] / 2
        return AllReduces(nbytes, number, moved=nbytes)

    def _bytes(self, atom: Atom) -> float:
        """The bytes of a value on each device."""
        if isinstance(atom, Literal):
            return 0.0
        aval = aval_of(atom)
        parts = math.prod(self._mesh[axis] for axis in axes_of(sharded(atom, self._known)))
        return size(atom) * getattr(aval.dtype, "itemsize", 4) / parts
