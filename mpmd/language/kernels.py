"""``mpmd.cost``: says that a function is one kernel, for plans."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpmd.compat import api_boundary
from mpmd.validation import Fault, callable_fault, number_fault, raise_faults, str_fault

KERNEL_SCOPE = "mpmd.cost"
"""The beginning of the name of a kernel in name stacks."""

_CALLS = itertools.count(1)
"""Numbers of traced calls, which tell the equations of one call from the equations of the next."""

Function = TypeVar("Function", bound=Callable)


class KernelWork(NamedTuple):
    """The work of a call of a kernel; ``None``: the work of its equations.

    Attributes:
      operations, nbytes: of the forward.
      backward_operations, backward_bytes: of the backward.
    """

    operations: float | None = None
    nbytes: float | None = None
    backward_operations: float | None = None
    backward_bytes: float | None = None


boundary_p = Primitive("kernel_boundary")
"""The operands, or the results, of a call of a kernel.

Parameters: ``work``: of the call, for its operands, and none for its results; ``calls``: of how many calls
under ``vmap``; ``backward``: whether differentiation has turned it round; ``whole``: for each operand, the
dimensions along which devices do not divide it.
"""
boundary_p.multiple_results = True


@api_boundary
def cost(
    fun: Function,
    *,
    forward: float = 1.0,
    backward: float = 1.0,
    operations: float | None = None,
    nbytes: float | None = None,
    backward_operations: float | None = None,
    backward_bytes: float | None = None,
    dimensions: str | None = None,
    divides: str | None = None,
) -> Function:
    """Says that a function runs as one kernel, so that ``mpmd.plan`` knows its cost.

    ::

        attention = mpmd.cost(functools.partial(jax.nn.dot_product_attention, is_causal=True), backward=1.25)
        attention = mpmd.cost(
            jax.nn.dot_product_attention,
            operations=4 * b * t * t * h * d,
            backward_operations=10 * b * t * t * h * d,
            dimensions="bthd,bshd,bshd->bthd",
            divides="bh",
        )

    The function computes the same values as without ``cost``. A plan counts its operands and results as
    memory traffic and not the values between them, which are no residuals either: the backward computes them
    again. So a plan needs no device that has the kernel: plan with the equations of a reference
    implementation, run with the kernel. It may be differentiated, mapped, rematerialised and scanned.

    Args:
      fun: of arrays.
      forward, backward: the operations of the kernel's forward and backward over the equations'. A
        flash attention without a mask has the backward 1.25, since it computes the scores again.
      operations, backward_operations: multiplications and additions of one call, as numbers, in place of the
        operations of the equations. They run at ``Cluster.flops``. Under ``vmap`` each row is a call.
      nbytes, backward_bytes: bytes that one call reads and writes, in place of its operands and results.
      dimensions: a letter for each dimension of the arrays in the arguments and results, as in ``einsum``.
      divides: the letters of the dimensions along which devices can divide the kernel; along other dimensions
        they gather its operands. By default it divides as its equations do, and so it does along dimensions
        that ``vmap`` adds.

    Raises: ``TypeError`` for arguments that are not a function, numbers or texts; ``ValueError`` for numbers
      that are negative or infinite, for ``divides`` without ``dimensions``, and, when it is called, for
      dimensions that the arrays do not have.
    """
    numbers = {
        "forward": forward,
        "backward": backward,
        "operations": operations,
        "nbytes": nbytes,
        "backward_operations": backward_operations,
        "backward_bytes": backward_bytes,
    }
    raise_faults(
        callable_fault("fun", fun),
        *(
            number_fault(name, value, least=0, finite=True, optional=name not in ("forward", "backward"))
            for name, value in numbers.items()
        ),
        *_letters_faults(dimensions, divides),
        title="mpmd.cost: ",
    )
    work = KernelWork(operations, nbytes, backward_operations, backward_bytes)
    factors = (
        forward if operations is None else 0.0,
        backward if backward_operations is None else 0.0,
        1.0 if nbytes is None else 0.0,
        1.0 if backward_bytes is None else 0.0,
    )
    scope = ":".join([KERNEL_SCOPE, *(repr(float(factor)) for factor in factors)])
    of_operands, of_results = _letters(dimensions)
    is_bounded = work != KernelWork() or divides is not None

    @api_boundary
    def kernel(*args, **kwargs):
        if is_bounded:
            args, kwargs = _bounded((args, kwargs), work, of_operands, divides)
        with jax.named_scope(f"{scope}:{next(_CALLS)}"):
            results = fun(*args, **kwargs)
        return results if divides is None else _bounded(results, None, of_results, divides)

    return functools.update_wrapper(kernel, fun)  # type: ignore[return-value]


def _letters_faults(dimensions: Any, divides: Any) -> Iterator[Fault | None]:
    faults = [
        str_fault(name, value, optional=True)
        for name, value in (("dimensions", dimensions), ("divides", divides))
    ]
    yield from faults
    if any(faults) or (dimensions is None and divides is None):
        return
    example = 'dimensions="bthd,bshd,bshd->bthd", divides="bh"'
    if dimensions is None or divides is None:
        yield ValueError(f"dimensions and divides belong together, as in {example}")
    elif dimensions.count("->") != 1 or not dimensions.replace("->", "").replace(",", "").isalpha():
        yield ValueError(f"dimensions must be letters for each array, as in {example}, not {dimensions!r}")
    elif unknown := sorted({*divides} - {*dimensions}):
        yield ValueError(f"divides has {', '.join(unknown)}, which dimensions={dimensions!r} has not")


def _letters(dimensions: str | None) -> list[list[str] | None]:
    """The letters of each operand, and of each result."""
    return [None, None] if dimensions is None else [side.split(",") for side in dimensions.split("->")]


def _bounded(tree: Any, work: KernelWork | None, letters: Sequence[str] | None, divides: str | None) -> Any:
    """The arrays of a tree behind a boundary."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
    arrays = [leaves[i] for i in places]
    if letters is not None and [*map(len, letters)] != [array.ndim for array in arrays]:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"mpmd.cost: dimensions {','.join(letters)} are not those of arrays {shapes}")
    whole = tuple(
        tuple(d for d, letter in enumerate(of_array) if letter not in (divides or ""))
        for of_array in letters or [""] * len(arrays)
    )
    if arrays:
        bounded = boundary_p.bind(*arrays, work=work, calls=1, backward=False, whole=whole)
        for i, array in zip(places, bounded, strict=True):
            leaves[i] = array
    return jax.tree.unflatten(treedef, leaves)


@boundary_p.def_impl
def _impl(*args, **params):
    return args


@boundary_p.def_abstract_eval
def _abstract_eval(*avals, **params):
    return avals


def _linear(values: Sequence[Any], whole: Sequence[tuple[int, ...]], **params: Any) -> list[Any]:
    """Binds the boundary of the tangents or cotangents that are no symbolic zeros."""
    results = list(values)
    live = [i for i, value in enumerate(values) if not isinstance(value, ad.Zero)]
    if live:
        bounded = boundary_p.bind(*(values[i] for i in live), whole=tuple(whole[i] for i in live), **params)
        for i, value in zip(live, bounded, strict=True):
            results[i] = value
    return results


def _jvp(primals, tangents, **params):
    return boundary_p.bind(*primals, **params), _linear(tangents, **params)


def _transpose(cotangents, *args, backward, **params):
    results = _linear(cotangents, backward=not backward, **params)
    return [None if isinstance(result, ad.Zero) else result for result in results]


def _batch(args, dims, *, whole, calls, **params):
    rows = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    moved = tuple(
        of_array if dim is None else tuple(d + (d >= dim) for d in of_array)
        for of_array, dim in zip(whole, dims, strict=True)
    )
    return boundary_p.bind(*args, whole=moved, calls=calls * rows, **params), dims


ad.primitive_jvps[boundary_p] = _jvp
ad.primitive_transposes[boundary_p] = _transpose
batching.primitive_batchers[boundary_p] = _batch
mlir.register_lowering(boundary_p, lambda ctx, *args, **params: args)
