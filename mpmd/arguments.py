"""Checks what a step is called with, and flattens it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from mpmd.array import MpmdArray
from mpmd.errors import CompileError
from mpmd.ir import Spec
from mpmd.sharding import to_spec
from mpmd.tree import argument_paths, spread_prefix


def describe(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and weak type of an argument leaf. Raises ``TypeError`` when it is not an array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, MpmdArray):
        return leaf.aval
    return as_described(jax.typeof(leaf))


def as_described(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and weak type of an abstract value."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def to_host(leaf: Any, described: jax.ShapeDtypeStruct) -> np.ndarray:
    """An argument leaf as a numpy array; of keys, the integers inside."""
    if isinstance(leaf, MpmdArray):
        return leaf.raw_value()
    if jax.dtypes.issubdtype(described.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf, dtype=described.dtype)


def check_donated_once(call: Call) -> None:
    """Raises ``ValueError`` when an array that is given up is passed a second time, or was before."""
    faults = []
    first_seen: dict[int, int] = {}
    for i, leaf in enumerate(call.leaves):
        if isinstance(leaf, (jax.Array, MpmdArray)):
            if leaf.is_deleted():
                faults.append(
                    f"{call.paths[i]} was deleted or donated to an earlier call; pass that call's result"
                )
            j = first_seen.setdefault(id(leaf), i)
            if j != i and (call.donated[i] or call.donated[j]):
                faults.append(
                    f"{call.paths[j]} and {call.paths[i]} are the same array and it is donated; pass a copy"
                )
    if faults:
        raise ValueError("\n".join(faults))


def flatten_specs(specs: Any, tree: Any, what: str) -> list[Any]:
    """Spreads a pytree prefix of ``PartitionSpec``s over the leaves of ``tree``.

    ``None`` and ``NamedSharding`` are allowed in place of a ``PartitionSpec``. Raises ``CompileError``.
    """

    def is_spec(x):
        return x is None or isinstance(x, (PartitionSpec, NamedSharding))

    try:
        leaves = spread_prefix(specs, tree, is_spec)
    except ValueError as error:
        reason = " ".join(str(error).split()).replace("tree_map tree", what)
        raise CompileError(f"{what} is not a pytree prefix of what it describes: {reason}") from error
    if wrong := [leaf for leaf in leaves if not is_spec(leaf)]:
        raise CompileError(f"{what} has {wrong[0]!r} where a PartitionSpec is needed")
    return [leaf.spec if isinstance(leaf, NamedSharding) else leaf for leaf in leaves]


def check_specs(
    paths: Sequence[str],
    avals: Sequence[Any],
    specs: Sequence[PartitionSpec | None],
    submesh: AbstractMesh,
    mpmd_axis_name: str,
    what: str,
) -> list[Spec | None]:
    """Checks that every spec fits its leaf and the submesh. Raises ``CompileError`` with all that do not."""
    faults = []
    for path, aval, spec in zip(paths, avals, specs, strict=True):
        for fault in _spec_faults(aval.shape, spec or PartitionSpec(), submesh, mpmd_axis_name):
            faults.append(f"{what}: {path} with shape {tuple(aval.shape)} has the spec {spec}, {fault}")
    if faults:
        raise CompileError(faults)
    return [None if spec is None else to_spec(spec) for spec in specs]


def _spec_faults(
    shape: tuple[int, ...], spec: PartitionSpec, submesh: AbstractMesh, mpmd_axis_name: str
) -> list[str]:
    if len(to_spec(spec)) > len(shape):
        return [f"which has more entries than the {len(shape)} dimensions"]
    faults = []
    for dimension, entry in enumerate(spec):
        axes = entry if isinstance(entry, (tuple, list)) else (entry,)
        axes = [axis for axis in axes if axis is not None]
        for axis in axes:
            if axis == mpmd_axis_name:
                faults.append(
                    f"which names the axis {axis!r} along which the groups are; leave it out, as a value "
                    "lives on the groups of the stages that use it"
                )
            elif axis not in submesh.shape:
                names = ", ".join(name for name in submesh.axis_names if name != mpmd_axis_name) or "none"
                faults.append(f"which names the axis {axis!r}; the axes of a group are: {names}")
        parts = math.prod(submesh.shape.get(axis, 1) for axis in axes)
        if shape[dimension] % parts:
            faults.append(f"but dimension {dimension} of size {shape[dimension]} does not divide by {parts}")
    return faults


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call, flattened; static ones set apart.

    Attributes:
      static: the static arguments by position and by name.
      treedef: of the pair of the other arguments, a tuple and a dict.
      leaves, avals, donated: for each leaf, itself, its shape and dtype, and whether the caller gives it up.
    """

    static: tuple[tuple[int | str, Any], ...]
    num_args: int
    treedef: Any
    leaves: tuple[Any, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[bool, ...]

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """What to call the leaves in messages."""
        return argument_paths(*jax.tree.unflatten(self.treedef, self.leaves))

    @functools.cached_property
    def key(self) -> Any:
        """Equal for calls that the same compiled step serves."""
        kinds = tuple((aval.shape, aval.dtype, aval.weak_type) for aval in self.avals)
        return (self.static, self.treedef, kinds)

    def function(self, fun: Callable) -> Callable:
        """``fun`` as a function of the arguments that are not static."""
        if not self.static:
            return fun
        static = dict(self.static)

        def bound(*args, **kwargs):
            remaining = iter(args)
            merged = [static[i] if i in static else next(remaining) for i in range(self.num_args)]
            named = {name: value for name, value in static.items() if isinstance(name, str)}
            return fun(*merged, **named, **kwargs)

        return bound

    def check_serves(self, other: Call) -> None:
        """Raises ``ValueError`` naming the leaves in which ``other`` differs from this call.

        Weak types may differ: they decide how a step is traced, and it has been.
        """
        if self.key == other.key:
            return
        if self.static != other.static or self.treedef != other.treedef:
            raise ValueError(
                "the step was compiled for other static arguments or another structure: "
                f"{self.treedef} {self.static}, not {other.treedef} {other.static}"
            )
        differing = [
            f"{path} is {there.dtype}{list(there.shape)}, not {here.dtype}{list(here.shape)}"
            for path, here, there in zip(self.paths, self.avals, other.avals, strict=True)
            if (here.shape, here.dtype) != (there.shape, there.dtype)
        ]
        if differing:
            raise ValueError("the step was compiled for other arguments: " + "; ".join(differing))


@dataclasses.dataclass(frozen=True)
class Signature:
    """How a step's arguments are to be taken."""

    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]

    @classmethod
    def of(
        cls,
        fun: Callable,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        donate_argnums: tuple[int, ...],
    ) -> Signature:
        """An argument that is named by position may be passed by name, and the other way round.

        Raises: ``ValueError`` for positions that ``fun`` does not have.
        """
        names = _positional_names(fun)
        for what, positions in (("static_argnums", static_argnums), ("donate_argnums", donate_argnums)):
            wrong = [i for i in positions if not -len(names) <= i < len(names)]
            if wrong and not _takes_any_number(fun):
                raise ValueError(f"{what} has {wrong}, but the step takes {len(names)} positional arguments")
        by_name = {names[i] for i in static_argnums if -len(names) <= i < len(names)}
        by_position = {names.index(name) for name in static_argnames if name in names}
        donated = {names[i] for i in donate_argnums if -len(names) <= i < len(names)}
        return cls(
            (*static_argnums, *by_position), (*static_argnames, *by_name), donate_argnums, tuple(donated)
        )

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> Call:
        """Flattens a call's arguments.

        Raises: ``TypeError`` for a leaf that is no array, ``ValueError`` for a static argument that is not
          hashable.
        """
        static_positions = {i % len(args) for i in self.static_argnums if -len(args) <= i < len(args)}
        donated_positions = {i % len(args) for i in self.donate_argnums if -len(args) <= i < len(args)}
        if both := static_positions & donated_positions:
            raise ValueError(f"the arguments {sorted(both)} are both static and donated")
        named = [(name, value) for name, value in kwargs.items() if name in self.static_argnames]
        static = tuple((i, args[i]) for i in sorted(static_positions)) + tuple(sorted(named))
        for where, value in static:
            try:
                hash(value)
            except TypeError as error:
                raise ValueError(
                    f"the static argument {where!r} is a {type(value).__name__}, which is not hashable; "
                    "arrays and pytrees of arrays cannot be static"
                ) from error
        positions = [i for i in range(len(args)) if i not in static_positions]
        traced = tuple(args[i] for i in positions)
        traced_kwargs = {name: value for name, value in kwargs.items() if name not in self.static_argnames}
        leaves, treedef = jax.tree.flatten((traced, traced_kwargs))
        donated = [i in donated_positions for i in positions for _ in jax.tree.leaves(args[i])]
        # Dicts are flattened in the order of their keys.
        donated += [
            name in self.donate_argnames
            for name in sorted(traced_kwargs)
            for _ in jax.tree.leaves(traced_kwargs[name])
        ]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise TypeError(
                "a step compiled by mpmd_jit_with_loop runs on groups of devices and cannot be traced: call "
                "it outside of jax.jit, jax.grad and jax.vmap, or transform the function it was made from"
            )
        try:
            avals = tuple(map(describe, leaves))
        except TypeError:
            raise TypeError(_not_arrays(argument_paths(traced, traced_kwargs), leaves)) from None
        return Call(static, len(args), treedef, tuple(leaves), avals, tuple(donated))


def _takes_any_number(fun: Callable) -> bool:
    """Whether more positional arguments are possible than those with names."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (ValueError, TypeError):  # not every callable tells
        return True
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)


def _positional_names(fun: Callable) -> list[str]:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (ValueError, TypeError):  # not every callable tells
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in positional]


def _not_arrays(paths: Sequence[str], leaves: Sequence[Any]) -> str:
    faults = []
    for path, leaf in zip(paths, leaves, strict=True):
        try:
            describe(leaf)
        except TypeError:
            faults.append(
                f"{path} is a {type(leaf).__name__}, not an array or a number; "
                "name it in static_argnums or static_argnames if the step depends on it"
            )
    return "\n".join(faults)
