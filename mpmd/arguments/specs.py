"""The user's specs of arguments and results: checked, and spread over the leaves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from mpmd.arguments.call import Call
from mpmd.errors import CompileError
from mpmd.ir.plan import Spec
from mpmd.sharding import WITHOUT_PARTIAL_SUMS, to_spec
from mpmd.util.tables import first_few
from mpmd.util.tree import broadcast_prefix, named_leaves, paths
from mpmd.validation import shown


class GroupAxes(NamedTuple):
    """The names of axes that specs may have.

    Attributes:
      names: the axes of every group's submesh.
      mpmd_axis_name: the axis along which the groups are, if any, which no spec may name.
    """

    names: Sequence[str]
    mpmd_axis_name: str | None = None


def input_specs(
    in_specs: Any, call: Call, axes: GroupAxes, of_keywords: Mapping[str, Any] | None
) -> list[Spec | None]:
    """The spec of each argument leaf of a call; ``None`` where none is given.

    Args:
      in_specs: a pytree prefix of the positional arguments that are not static.
      of_keywords: for arguments that are passed by name, a pytree prefix of each.

    Raises: ``CompileError`` that names every leaf whose spec does not fit it, whatever the sizes of the axes,
      and arguments that the call does not pass by name.
    """
    args, kwargs = jax.tree.unflatten(call.treedef, call.avals)
    named = of_keywords or {}
    if missing := [repr(name) for name in named if name not in kwargs]:
        passed = ", ".join(map(repr, kwargs)) or "none"
        raise CompileError(
            f"kwarg_shardings has {first_few(missing, 5)}, and passed by name are {passed}: for an argument "
            "that is passed by position, give in_shardings"
        )
    # ``args`` is a tuple, whatever sequence the specs come in.
    prefix = tuple(in_specs) if isinstance(in_specs, list) else in_specs
    specs = _flatten_specs(prefix, args, "in_shardings")
    specs += _flatten_specs({name: named.get(name) for name in kwargs}, kwargs, "kwarg_shardings")
    return _checked("in_shardings", call.paths, call.avals, specs, axes)


def output_specs(out_specs: Any, out_shape: Any, axes: GroupAxes) -> list[Spec | None]:
    """The spec of each result leaf; ``None`` where the user leaves it open.

    Args:
      out_specs: a pytree prefix of the result.
      out_shape: the result's shapes and dtypes.

    Raises: ``CompileError`` that names every leaf whose spec does not fit it, whatever the sizes of the axes.
    """
    specs = _flatten_specs(out_specs, out_shape, "out_shardings")
    return _checked("out_shardings", paths(out_shape), jax.tree.leaves(out_shape), specs, axes)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


def specs_faults(what: str, specs: Any) -> list[TypeError]:
    return [
        TypeError(f"{what} must have PartitionSpecs, NamedShardings or None, not {shown(leaf)}")
        for leaf in jax.tree.leaves(specs, is_leaf=_is_spec)
        if not _is_spec(leaf)
    ]


def keyword_specs_faults(specs: Any) -> list[TypeError]:
    if specs is not None and not isinstance(specs, Mapping):
        text = f"kwarg_shardings must be a dict of the specs of arguments, by name, not {shown(specs)}"
        return [TypeError(text)]
    return specs_faults("kwarg_shardings", None if specs is None else dict(specs))


def _flatten_specs(specs: Any, tree: Any, what: str) -> list[PartitionSpec | None]:
    """Spreads a pytree prefix of specs over the leaves of ``tree``.

    A pytree of specs that was built from another call's arguments may differ in its static data, such as the
    functions of a ``TrainState`` that was created again.
    """
    try:
        leaves = broadcast_prefix(specs, tree, _is_spec)
    except ValueError as error:
        pairs = named_leaves("", specs, _is_spec)
        if tuple(path for path, _ in pairs) != paths(tree):
            reason = " ".join(str(error).split()).replace("tree_map tree", what)
            raise CompileError(f"{what} is not a pytree prefix of what it describes: {reason}") from error
        leaves = [leaf for _, leaf in pairs]
    return [leaf.spec if isinstance(leaf, NamedSharding) else leaf for leaf in leaves]


def _checked(
    what: str,
    leaf_paths: Sequence[str],
    avals: Sequence[Any],
    specs: Sequence[PartitionSpec | None],
    axes: GroupAxes,
) -> list[Spec | None]:
    faults = [
        f"{what}: {path} with shape {tuple(aval.shape)} has the spec {spec}, {fault}"
        for path, aval, spec in zip(leaf_paths, avals, specs, strict=True)
        if spec is not None
        for fault in _spec_faults(aval.shape, spec, axes)
    ]
    if faults:
        raise CompileError(faults)
    return [None if spec is None else to_spec(spec) for spec in specs]


def _spec_faults(shape: tuple[int, ...], spec: PartitionSpec, axes: GroupAxes) -> Iterator[str]:
    if spec.unreduced or spec.reduced:
        yield WITHOUT_PARTIAL_SUMS
    elif len(to_spec(spec)) > len(shape):
        yield f"which has more entries than the {len(shape)} dimensions"
    else:
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in to_spec(spec))
        for axis in filter(None, itertools.chain(*entries)):
            if axis == axes.mpmd_axis_name:
                yield (
                    f"which names the axis {axis!r} along which the groups are; leave it out, as a value "
                    "lives on the groups of the stages that use it"
                )
            elif axis not in axes.names:
                names = ", ".join(name for name in axes.names if name != axes.mpmd_axis_name) or "none"
                yield f"which names the axis {axis!r}, but no group has it; the axes of a group are: {names}"
