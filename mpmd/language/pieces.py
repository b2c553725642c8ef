"""Even division: a batch is cut into microbatches, layers into stages."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from mpmd.compat import api_boundary
from mpmd.language.decisions import current_decisions, is_compiled_outside_of_loops
from mpmd.language.identities import identity
from mpmd.sharding import explicit_sharding, to_sharding
from mpmd.util.tables import first_few
from mpmd.util.tree import named_leaves
from mpmd.validation import int_fault, raise_faults

_PASS_ARRAYS = (
    "pass arrays (each number in a list is a leaf of its own; np.asarray makes one array of the list)"
)


_ONE_SHAPE = (
    "Microbatches of one loop have one shape, and are stacked along their first axis, as by jnp.stack; "
    "others take a loop for each shape"
)


def list_read_as_pytree(named: Mapping[str, Any]) -> str:
    """The first list among pytrees that may be meant as microbatches, for errors; empty if there is none.

    Such a list has elements of one structure, like a batch of images and one of masks, which it may also be.
    """
    for name, tree in named.items():
        for path, node in named_leaves(name, tree, _is_alike_list):
            if _is_alike_list(node):
                shapes = (str(jnp.shape(leaf)) for leaf in jax.tree.leaves(node))
                return (
                    f". {path} is a list, which is read as one pytree of arrays: each microbatch is a list "
                    f"of their parts. The arrays have the shapes {first_few(shapes, 5)}. {_ONE_SHAPE}"
                )
    return ""


def _is_alike_list(node: Any) -> bool:
    return isinstance(node, list) and len(node) > 1 and len(set(map(jax.tree.structure, node))) == 1


@contextlib.contextmanager
def list_explained(named: Mapping[str, Any]) -> Iterator[None]:
    """A context whose errors say how a list of arrays was read, if they speak of a list or of rows."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        is_known = type(error) in (AttributeError, TypeError, ValueError) and _ONE_SHAPE not in str(error)
        said = list_read_as_pytree(named) if is_known and re.search(r"\b(list|rows)\b", str(error)) else ""
        if not said:
            raise
        raise type(error)(f"{error}{said}") from error


def count_along(axis: int, xs: Any) -> int:
    leaves = named_leaves("xs", xs)
    if not leaves:
        raise ValueError("treduce needs at least one array in xs to take microbatches from; see treduce_i")
    flat = [f"{path} with shape {jnp.shape(leaf)}" for path, leaf in leaves]
    if short := [
        text
        for text, (_, leaf) in zip(flat, leaves, strict=True)
        if not -jnp.ndim(leaf) <= axis < jnp.ndim(leaf)
    ]:
        raise ValueError(
            f"treduce takes microbatches along axis {axis}, which {first_few(short, 5)} lacks: pass arrays "
            "with that axis (each number in a list is an array of its own; np.asarray makes one array of the "
            "list)"
        )
    sizes = {jnp.shape(leaf)[axis] for _, leaf in leaves}
    if len(sizes) > 1:
        raise ValueError(
            f"treduce needs the same number of microbatches, the size along axis {axis}, in every leaf; got "
            + first_few(flat, 5)
            + list_read_as_pytree({"xs": xs})
        )
    return sizes.pop()


@api_boundary
def microbatches(batch: Any, n: int | None = None) -> Any:
    """Cuts a batch into ``n`` microbatches, for ``treduce``.

    Args:
      batch: a pytree of arrays, all with the same leading axis of rows, ``(rows, ...)``.
      n: the number of microbatches, by which the number of rows divides. ``None``: the number that a plan
        decides, or else 1.

    Returns: the pytree with leaves of shape ``(n, rows // n, ...)``: microbatch 0 has the first rows. A numpy
      array is a view of the batch's. Sharded rows stay sharded within each microbatch, if they divide: along
      ``Explicit`` axes by their types, along ``Auto`` axes by constraints of the compiled step.
    Raises: ``ValueError`` that names every leaf that cannot be cut, or when leaves differ in their rows;
      ``TypeError`` for leaves that are not arrays.
    """
    size = number_of_microbatches("n", n)
    named = named_leaves("batch", batch)
    if not named:
        raise ValueError("the batch has no array to cut into microbatches")
    with list_explained({"batch": batch}):
        return jax.tree.unflatten(jax.tree.structure(batch), cut_rows(named, size, is_open=n is None))


def number_of_microbatches(name: str, n: int | None) -> int:
    if n is None:
        n = current_decisions().num_microbatches or 1
    raise_faults(int_fault(name, n))
    return int(n)


def cut_rows(named: Sequence[tuple[str, Any]], n: int, hint: str = "", *, is_open: bool = False) -> list[Any]:
    """Cuts the rows of leaves, given with their names, into ``n`` microbatches.

    Args:
      hint: follows the error where leaves differ in rows.
      is_open: whether the step leaves ``n`` to a plan. The compiler is told of the loops that take the rows.

    Raises: the errors of ``microbatches``.
    """
    if wrong := [
        f"{path} is of type {type(leaf).__name__}" for path, leaf in named if not hasattr(leaf, "shape")
    ]:
        raise TypeError(f"{first_few(wrong, 5)}: {_PASS_ARRAYS}")
    texts = [f"{path} has shape {tuple(leaf.shape)}" for path, leaf in named]
    if scalars := [text for text, (_, leaf) in zip(texts, named, strict=True) if not leaf.shape]:
        raise ValueError(
            f"{first_few(scalars, 5)}: there are no rows to cut into microbatches; {_PASS_ARRAYS}"
        )
    all_shapes = first_few(texts, 5)
    if len({leaf.shape[0] for _, leaf in named}) > 1:
        raise ValueError(f"the leaves of a batch need the same number of rows, and {all_shapes}{hint}")
    rows = named[0][1].shape[0]
    if rows % n or not rows:
        raise ValueError(
            f"{rows} rows do not divide into {n} microbatches of equal size{_others(rows, n)}: {all_shapes}; "
            "take another number, or leave out or pad the rows that are left over"
        )
    cut = [_cut(leaf, n) for _, leaf in named]
    return [open_rows_p.bind(leaf)[0] for leaf in cut] if is_open and is_compiled_outside_of_loops() else cut


def _others(rows: int, n: int) -> str:
    divisors = [d for d in range(1, rows + 1) if rows % d == 0]
    few, more = (d for d in divisors if d < n), (d for d in divisors if d > n)
    near = [str(d) for d in (max(few, default=None), min(more, default=None)) if d]
    return f", but into {' or '.join(near)}" if near else ""


def _cut(leaf: Any, n: int) -> Any:
    """A leaf as microbatches. By default, JAX would give the sharding of rows to the new axis."""
    shape = (n, leaf.shape[0] // n, *leaf.shape[1:])
    sharding = explicit_sharding(jax.typeof(leaf)) if isinstance(leaf, jax.Array) else None
    if sharding is None or not sharding.spec or sharding.spec[0] is None:
        return leaf.reshape(shape)
    return jax.lax.reshape(leaf, shape, out_sharding=to_sharding((None, *sharding.spec), sharding.mesh))


open_rows_p = identity("open_rows")
"""Takes an array of rows that are cut into a number of microbatches that the step leaves open."""
ad.deflinear2(open_rows_p, lambda cotangents, x: cotangents)
batching.primitive_batchers[open_rows_p] = lambda args, dims: (open_rows_p.bind(*args), dims)


@api_boundary
def stage_ends(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The layers after which to mark the end of a stage, so that all stages have equally many layers.

    ::

        ends = mpmd.stage_ends(len(layers), num_stages=4)     # of 30 layers: (7, 15, 22)
        for i, layer in enumerate(layers):
            x = layer(x)
            if i in ends:
                x = mpmd.mark_stage_end(x)

    If the layers do not divide, the first stages have one more, so that the last stage has time for the loss:
    30 layers in 4 stages are 8, 8, 7 and 7.

    Args:
      num_layers: at least ``num_stages``.
      num_stages: the number of the schedule's stages.

    Returns: the positions of ``num_stages - 1`` layers.
    Raises: ``ValueError`` for fewer layers than stages, or no stage; ``TypeError`` for other types than ints.
    """
    raise_faults(int_fault("num_layers", num_layers), int_fault("num_stages", num_stages))
    if num_stages > num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {num_stages} stages: each stage needs a layer at least"
        )
    layers, more = divmod(num_layers, num_stages)
    return tuple(layers * stage + min(stage, more) - 1 for stage in range(1, num_stages))
