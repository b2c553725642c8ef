"""One call of a step: its leaves, and the conditions on them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpmd.arrays.array import MpmdArray, placement_on
from mpmd.ir.placement import Placement
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.step_future import StepFuture
from mpmd.util.tables import first_few, group_leaves
from mpmd.util.tree import argument_paths
from mpmd.validation import is_int, raise_faults, type_fault

_MOST = 5


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call, flattened; static ones set apart.

    Attributes:
      static: the static arguments, each with its position, or with its name where it was passed by name.
      num_args: the number of positional arguments, static ones included.
      treedef: of the pair of the other arguments, a tuple and a dict.
      leaves, avals, donated: for each leaf: value, shape and dtype, and whether the caller gives it up.
    """

    static: tuple[tuple[int | str, Any], ...]
    num_args: int
    treedef: Any
    leaves: tuple[Any, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[bool, ...]

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        return argument_paths(*jax.tree.unflatten(self.treedef, self.leaves))

    @functools.cached_property
    def key(self) -> Any:
        """Equal for calls that the same compiled step serves."""
        kinds = tuple((aval.shape, aval.dtype, aval.weak_type) for aval in self.avals)
        # Equal values of other types, such as 2 and 2.0, are other arguments, as to ``jax.jit``.
        static = tuple((where, type(value), value) for where, value in self.static)
        return (static, self.treedef, kinds)

    def described_by(self, avals: tuple[jax.ShapeDtypeStruct, ...]) -> Call:
        return dataclasses.replace(self, leaves=avals, avals=avals)

    def argument(self, argnum: int | str, names: Sequence[str], leaves: Sequence[Any]) -> Any:
        """One argument of the call, with other leaves in place of its own.

        Args:
          argnum: its position, or its name.
          names: the names of the positional parameters, which may also be passed by name.
          leaves: for each leaf of the call its substitute, which is no pytree.

        Raises: ``ValueError`` when the call has no such argument, or has a static one there.
        """
        check_argnum(argnum)
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        static = dict(self.static)
        traced = [i for i in range(self.num_args) if i not in static]
        passed = {**dict(zip(traced, args, strict=True)), **kwargs}
        # A parameter may be meant by its position and passed by its name, or the other way round.
        other = dict(enumerate(names)) | {name: i for i, name in enumerate(names)}
        for where in (argnum, other.get(argnum)):
            if where in passed:
                return passed[where]
            if where in static:
                raise ValueError(f"argument {argnum!r} is static")
        raise ValueError(
            f"there is no argument argnum={argnum!r}; the step was compiled for "
            f"{first_few(map(repr, passed), _MOST)}"
        )

    def function(self, fun: Callable) -> Callable:
        if not self.static:
            return fun
        static = dict(self.static)
        named = {name: value for name, value in static.items() if isinstance(name, str)}

        def bound(*args, **kwargs):
            remaining = iter(args)
            merged = [static[i] if i in static else next(remaining) for i in range(self.num_args)]
            return fun(*merged, **named, **kwargs)

        return bound

    def check_serves(self, other: Call) -> None:
        """Raises ``ValueError`` naming the leaves in which ``other`` differs from this call.

        Weak types may differ: they matter only while a step is traced.
        """
        if self.key == other.key:
            return
        if self.key[0] != other.key[0]:
            raise ValueError(
                f"the step was compiled for the static arguments {self.static}, not {other.static}"
            )
        if self.treedef != other.treedef:
            raise ValueError(f"the step was compiled for another structure of arguments: {self._diff(other)}")
        differing = [
            f"{path} is {there.dtype}{list(there.shape)}, not {here.dtype}{list(here.shape)}"
            for path, here, there in zip(self.paths, self.avals, other.avals, strict=True)
            if (here.shape, here.dtype) != (there.shape, there.dtype)
        ]
        if differing:
            raise ValueError("the step was compiled for other arguments: " + "; ".join(differing))

    def _diff(self, other: Call) -> str:
        missing = [path for path in self.paths if path not in other.paths]
        added = [path for path in other.paths if path not in self.paths]
        if not missing and not added:
            return f"{self.treedef}, not {other.treedef}"
        both = (("lacks", missing), ("has", added))
        return "the call " + " and ".join(
            f"{verb} {first_few(paths, _MOST)}" for verb, paths in both if paths
        )

    def placements(self, runtime: Runtime) -> tuple[Placement, ...]:
        return tuple(placement_on(leaf, runtime) for leaf in self.leaves)

    def check_held(self, runtime: Runtime) -> None:
        elsewhere = [
            path
            for path, leaf in zip(self.paths, self.leaves, strict=True)
            if isinstance(leaf, MpmdArray) and leaf.runtime is not runtime
        ]
        if elsewhere:
            raise ValueError(
                f"{first_few(elsewhere, _MOST)}: held by the groups of another mesh, or of this one before "
                "it was closed. A function without a loop runs where its arguments are; mpmd.to_host fetches "
                "them"
            )

    def check_donations(self) -> None:
        faults = []
        arrays = [(i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, jax.Array)]
        if deleted := {i for i, leaf in arrays if leaf.is_deleted()}:
            # One name for a whole argument, rather than one for each leaf.
            names = group_leaves({path: i in deleted for i, path in enumerate(self.paths)})
            gone = [name for name, (first, *_) in names if self.paths.index(first) in deleted]
            were = "was" if len(gone) == 1 else "were"
            faults.append(
                f"{first_few(gone, _MOST)} {were} deleted or donated to an earlier call; pass that call's "
                "result"
            )
        first_seen: dict[int, int] = {}
        for i, leaf in arrays:
            j = first_seen.setdefault(id(leaf), i)
            if j != i and (self.donated[i] or self.donated[j]):
                faults.append(
                    f"{self.paths[j]} and {self.paths[i]} are the same array and it is donated; pass a copy"
                )
        if faults:
            raise ValueError("\n".join(faults))

    def donate_to(self, future: StepFuture) -> None:
        for array in self._donated_arrays:
            if isinstance(array, MpmdArray):
                array.donate_to(future)

    def delete_donated(self) -> None:
        for array in self._donated_arrays:
            array.delete()

    def delete_donated_by_host(self) -> None:
        for array in self._donated_arrays:
            if not isinstance(array, MpmdArray):
                array.delete()

    @functools.cached_property
    def _donated_arrays(self) -> list[jax.Array]:
        return [leaf for leaf in itertools.compress(self.leaves, self.donated) if isinstance(leaf, jax.Array)]


def check_argnum(argnum: Any) -> None:
    if not is_int(argnum):
        raise_faults(type_fault("argnum", argnum, str, "the position of an argument, or its name"))
