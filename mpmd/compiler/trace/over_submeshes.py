"""Moves a step to the submesh of whichever group runs it, and takes shardings out of the types of values.

Where mesh axes have the type ``Explicit``, JAX writes into the type of each value how it is sharded, and
checks it while the step is traced. The passes that follow rewrite equations, and for some new equations JAX
would ask for a sharding that only the user knows. So the step goes on as it would be over ``Auto`` axes: the
shardings in the types of variables are kept as specs, and ``reshard`` and ``out_sharding`` become sharding
constraints.

The meshes that ``shard_map``s and shardings name become abstract. A mesh of as many devices as a group has
becomes the group's devices, in their order. A sharding over any other mesh, such as the mesh of all groups,
is taken over the submesh if that has all the axes it names. So is one over a group's mesh that lacks axes of
size one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mpmd.compat import current_context
from mpmd.compiler.jaxprs.canonical import constraint
from mpmd.compiler.jaxprs.equations import (
    Atom,
    are_same,
    aval_of,
    avals_of,
    is_dropped,
    lookup,
    shape_of,
    with_eqns,
    with_params,
)
from mpmd.compiler.jaxprs.source import is_transposed, where
from mpmd.errors import CompileError
from mpmd.ir.plan import Spec
from mpmd.language.per_group import per_group_p, typed_again
from mpmd.sharding import (
    axes_named,
    explicit_sharding,
    for_each_dimension,
    is_explicit,
    to_sharding,
    to_spec,
    with_auto_axes,
    within,
)

_NAMES_MESH = frozenset("device_put jit layout_constraint shard_map sharding_constraint".split())
"""Equations whose parameters are over a mesh for another reason than the type of a result."""


class OverSubmeshes:
    """Replaces variables by variables without a sharding in their type, in equations, too, and meshes.

    A variable whose type has no sharding, as over ``Auto`` axes, stays the same.

    Attributes:
      specs: for each new variable, the spec in the type of the variable that it replaced; no entry where axes
        of another type may shard the value, too.
    """

    def __init__(self, submeshes: Sequence[AbstractMesh]):
        self.specs: dict[Var, Spec] = {}
        self._submeshes = [*map(with_auto_axes, submeshes)]
        self._faults: dict[str, None] = {}
        self._replaced: dict[Var, Var] = {}
        self._contexts: dict[int, Any] = {}  # by the identity of the context that each takes the place of

    def variable(self, var: Var) -> Var:
        if var not in self._replaced:
            sharding = explicit_sharding(var.aval)
            if sharding is None:
                self._replaced[var] = var
            else:
                self._replaced[var] = untyped = type(var)(_without_sharding(var.aval))
                is_known = not _other_axes(sharding.mesh) and not sharding.spec.unreduced
                if is_known and not is_dropped(untyped):
                    self.specs[untyped] = to_spec(sharding.spec)
        return self._replaced[var]

    def step(self, jaxpr: Jaxpr) -> Jaxpr:
        """Raises ``CompileError`` naming every equation over a mesh that is no group's."""
        moved = self._jaxpr(jaxpr)
        if self._faults:
            raise CompileError(list(self._faults))
        return moved

    def _jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        renamed: dict[Var, Atom] = {}
        eqns = [new for eqn in jaxpr.eqns for new in self._equations(eqn, renamed)]
        before = [*jaxpr.constvars, *jaxpr.invars, *jaxpr.eqns]
        constvars, invars = (
            [self.variable(var) for var in those] for those in (jaxpr.constvars, jaxpr.invars)
        )
        outvars = [self._atom(atom, renamed) for atom in jaxpr.outvars]
        if are_same([*constvars, *invars, *eqns], before):
            return jaxpr
        return with_eqns(jaxpr, eqns, constvars=constvars, invars=invars, outvars=outvars)

    def _atom(self, atom: Atom, renamed: Mapping[Var, Atom]) -> Atom:
        return lookup(self.variable(atom), renamed) if isinstance(atom, Var) else atom

    def _equations(self, eqn: JaxprEqn, renamed: dict[Var, Atom]) -> Iterable[JaxprEqn]:
        invars = [self._atom(atom, renamed) for atom in eqn.invars]
        outvars = [self.variable(var) for var in eqn.outvars]
        if eqn.primitive.name in ("reshard", "mesh_cast"):
            sharding = self._constraint_of(eqn)
            if sharding is None:
                renamed[outvars[0]] = invars[0]
            else:
                yield self._constrained(eqn, sharding, invars[0], outvars[0])
            return
        kinds = (Jaxpr, Mesh, AbstractMesh, NamedSharding)
        untyped = with_params(eqn, kinds, functools.partial(self._parameter, eqn))
        if eqn.primitive is per_group_p:
            fun = typed_again(eqn.params["fun"], avals_of(eqn.invars))
            untyped = untyped.replace(params={**untyped.params, "fun": fun})
        ctx = self._context(eqn)
        if untyped is eqn and are_same([*invars, *outvars, ctx], [*eqn.invars, *eqn.outvars, eqn.ctx]):
            yield eqn
            return
        untyped = untyped.replace(invars=invars, outvars=outvars, ctx=ctx)
        sharding = None if is_transposed(eqn) else _asked_for(eqn)
        if sharding is None or is_dropped(outvars[0]):
            yield untyped
        else:
            unconstrained = Var(outvars[0].aval)
            yield untyped.replace(outvars=[unconstrained])
            yield self._constrained(eqn, sharding, unconstrained, outvars[0])

    def _parameter(self, eqn: JaxprEqn, value: Any) -> Any:
        match value:
            case Jaxpr():
                return self._jaxpr(value)
            case Mesh() | AbstractMesh():
                return self._abstract(eqn, with_auto_axes(value))
            case NamedSharding(mesh=mesh) if is_explicit(mesh):
                if eqn.primitive.name not in _NAMES_MESH:
                    return None
                return self._abstract(eqn, NamedSharding(with_auto_axes(mesh), value.spec))
        return self._abstract(eqn, value)

    def _abstract(self, eqn: JaxprEqn, value: Any) -> Any:
        """The mesh or sharding over the submesh of a group, or over an abstract mesh of as many devices."""
        names_devices = eqn.primitive.name == "shard_map"  # of others a mesh is what they were traced in
        submesh, sizes = self._submeshes[0], {submesh.size for submesh in self._submeshes}
        match value:
            case Mesh() if not names_devices:
                return value
            case Mesh() if value.size in sizes:
                return value.abstract_mesh
            case NamedSharding(mesh=Mesh() | AbstractMesh() as mesh) if _are_axes_of(value, submesh):
                return value if mesh == submesh else NamedSharding(submesh, value.spec)
            case NamedSharding(mesh=Mesh() as mesh) if mesh.size in sizes:
                return NamedSharding(mesh.abstract_mesh, value.spec)
            case NamedSharding(mesh=Mesh()) if axes_named(value) <= set(submesh.axis_names):
                return NamedSharding(submesh, value.spec)
            case Mesh() | NamedSharding(mesh=Mesh()):
                self._faults[_fault(eqn, value, self._submeshes)] = None
        return value

    def _constraint_of(self, eqn: JaxprEqn) -> NamedSharding | None:
        """The sharding that a ``reshard`` gives its operand; ``None`` where that changes nothing.

        Functions that run within an ``Auto`` part of a step are entered and left by such equations, too.
        """
        after = explicit_sharding(aval_of(eqn.outvars[0]))
        before = explicit_sharding(aval_of(eqn.invars[0]))
        if after is None or not aval_of(eqn.outvars[0]).shape:
            return None
        if before is not None and to_spec(before.spec) == to_spec(after.spec):
            return None
        return after

    def _constrained(self, eqn: JaxprEqn, sharding: NamedSharding, value: Atom, result: Var) -> JaxprEqn:
        left = PartitionSpec.UNCONSTRAINED if _other_axes(sharding.mesh) else None
        entries = for_each_dimension(sharding.spec, len(shape_of(result)))
        spec = PartitionSpec(*(left if entry is None else entry for entry in entries))
        over_auto_axes = NamedSharding(with_auto_axes(sharding.mesh.abstract_mesh), spec)
        new = constraint(value, self._abstract(eqn, over_auto_axes), eqn)
        return new.replace(outvars=[result], ctx=self._context(eqn))

    def _context(self, eqn: JaxprEqn) -> Any:
        """JAX's settings when the equation was traced, but for the types of the mesh's axes."""
        if id(eqn.ctx) not in self._contexts:
            self._contexts[id(eqn.ctx)] = eqn.ctx
            with eqn.ctx.manager:
                mesh = jax.sharding.get_abstract_mesh()
                if is_explicit(mesh):
                    with within(with_auto_axes(mesh)):
                        self._contexts[id(eqn.ctx)] = current_context()
        return self._contexts[id(eqn.ctx)]


def _without_sharding(aval: Any) -> Any:
    mesh = with_auto_axes(aval.sharding.mesh)
    return aval.update(sharding=to_sharding([None] * len(aval.shape), mesh))


def _other_axes(mesh: Mesh | AbstractMesh) -> bool:
    """Whether axes that are not explicit have several devices."""
    return any(
        size > 1 and axis_type is not AxisType.Explicit
        for size, axis_type in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def _asked_for(eqn: JaxprEqn) -> NamedSharding | None:
    """The sharding that the user asked for where JAX alone would have taken another one."""
    if eqn.primitive.name in _NAMES_MESH or len(eqn.outvars) != 1:
        return None
    if isinstance(asked := eqn.params.get("out_sharding"), NamedSharding) and is_explicit(asked.mesh):
        return asked
    # Equations that make arrays of scalars, such as zeros, say this of replicated ones, too.
    initial = eqn.params.get("sharding")
    splits = isinstance(initial, NamedSharding) and is_explicit(initial.mesh) and any(initial.spec)
    return initial if splits else None


def _are_axes_of(sharding: NamedSharding, submesh: AbstractMesh) -> bool:
    """Whether a sharding's mesh is a submesh, but for axes of size one, outside of a ``shard_map``."""
    mesh = sharding.mesh
    large = {name: size for name, size in submesh.shape.items() if size > 1}
    return (
        AxisType.Manual not in mesh.axis_types
        and axes_named(sharding) <= set(submesh.axis_names)
        and {name: size for name, size in mesh.shape.items() if size > 1} == large
    )


def _fault(eqn: JaxprEqn, value: Mesh | NamedSharding, submeshes: Sequence[AbstractMesh]) -> str:
    mesh = value if isinstance(value, Mesh) else value.mesh
    shapes = dict.fromkeys(str(dict(submesh.shape)) for submesh in submeshes)
    return (
        f"{eqn.primitive} at {where(eqn)} is over the mesh {dict(mesh.shape)}, but a group's is "
        f"{' or '.join(shapes)}: leave the mesh out, to mean the group's, or give one of as many devices"
    )
