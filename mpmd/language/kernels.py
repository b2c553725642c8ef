"""``mpmd.cost``: says that a function is one kernel, for plans."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import ad, batching

from mpmd.compat import api_boundary
from mpmd.language.decisions import is_planned
from mpmd.language.identities import bind_to_tangents, identity
from mpmd.util.tree import with_leaves
from mpmd.validation import Fault, callable_fault, number_fault, raise_faults, str_fault

Function = TypeVar("Function", bound=Callable)

Whole = tuple[tuple[int, ...], ...]
"""For each array, the dimensions along which devices do not divide it."""


class KernelWork(NamedTuple):
    """The numbers that ``mpmd.cost`` has for a kernel, in place of the work of its equations."""

    operations: float = 0.0
    nbytes: float = 0.0


NO_WORK = KernelWork()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The policy of a ``jax.checkpoint`` whose function is one kernel, while a plan is made.

    A kernel is this one equation, so it keeps no values between its forward and its backward.

    Attributes:
      factor: from the operations of its equations to the kernel's; 0 where ``mpmd.cost`` says the number.
      bytes_factor: 0 where ``mpmd.cost`` says the bytes that the kernel moves; else 1.
      is_backward: whether it is a derivative. The equations of a backward compute the forward once more.
    """

    factor: float = 1.0
    bytes_factor: float = 1.0
    is_backward: bool = False

    def __call__(self, *args: Any, **params: Any) -> bool:
        """Whether ``jax.checkpoint`` keeps the results of an equation: never."""
        return False


boundary_p = identity("kernel_boundary")
"""The operands, or the results, within a kernel of which ``mpmd.cost`` has numbers or dimensions.

Parameters: ``work``: of a call, for operands and for the tangents or cotangents of results, else none;
``of_tangents``: the work of differentiated calls; ``calls``: of how many calls under ``vmap``; ``whole``: for
each operand, the dimensions along which devices do not divide it.
"""


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
    implementation, run with the kernel. Elsewhere ``cost`` changes nothing. It may be differentiated, mapped,
    rematerialised and scanned.

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
    kernels = (
        Kernel(forward * (operations is None), nbytes is None),
        Kernel(backward * (backward_operations is None), backward_bytes is None, is_backward=True),
    )
    work = (
        KernelWork(operations or 0.0, nbytes or 0.0),
        KernelWork(backward_operations or 0.0, backward_bytes or 0.0),
    )
    letters, letters_of_results = _letters(dimensions)

    @api_boundary
    def kernel(*args, **kwargs):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
        arrays = [leaves[i] for i in positions]
        whole = _whole(arrays, letters, divides)
        if not is_planned():
            return fun(*args, **kwargs)

        def on_arrays(*arrays):
            args, kwargs = jax.tree.unflatten(treedef, with_leaves(leaves, positions, arrays))
            return fun(*args, **kwargs)

        # Captured arrays become operands: masks, too, which ``jax.closure_convert`` leaves in the closure.
        jaxpr, results = jax.make_jaxpr(on_arrays, return_shape=True)(*arrays)

        def of_operands(*operands):
            captured, own = operands[len(arrays) :], operands[: len(arrays)]
            return jaxpr_as_fun(ClosedJaxpr(jaxpr.jaxpr, captured))(*own)

        whole += ((),) * len(jaxpr.consts)
        leaves = one_equation(of_operands, whole, _is_for_reverse(jaxpr))(*arrays, *jaxpr.consts)
        return jax.tree.unflatten(jax.tree.structure(results), leaves)

    def one_equation(fun: Callable, whole: Whole, is_for_reverse: bool) -> Callable:
        """A function of arrays as one equation, and its derivative as another one.

        Args:
          is_for_reverse: whether JAX differentiates the function in reverse alone.
        """

        def bounded(work, of_tangents, *operands):
            results = fun(*_bounded(operands, whole, work, NO_WORK))
            return _bounded(results, _whole(results, letters_of_results, divides), NO_WORK, of_tangents)

        forward = jax.checkpoint(functools.partial(bounded, work[0], NO_WORK), policy=kernels[0])
        derivative = jax.checkpoint(functools.partial(bounded, NO_WORK, work[1]), policy=kernels[1])
        if is_for_reverse:
            reverse = jax.custom_vjp(forward)
            reverse.defvjp(
                lambda *operands: (reverse(*operands), operands),
                lambda operands, cotangents: jax.vjp(derivative, *operands)[1](cotangents),
            )
            return reverse

        def differentiated(operands, tangents):
            positions = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

            def of_positions(*values):
                return derivative(*with_leaves(operands, positions, values))

            primals, live = ([values[i] for i in positions] for values in (operands, tangents))
            return either(*operands), jax.jvp(of_positions, primals, live)[1]

        either = jax.custom_jvp(forward)
        either.defjvp(differentiated, symbolic_zeros=True)
        return either

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
    return [None, None] if dimensions is None else [side.split(",") for side in dimensions.split("->")]


def _whole(arrays: Sequence[Any], letters: Sequence[str] | None, divides: str | None) -> Whole:
    if letters is None or divides is None:
        return ((),) * len(arrays)
    if [*map(len, letters)] != [array.ndim for array in arrays]:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"mpmd.cost: dimensions {','.join(letters)} are not those of arrays {shapes}")
    return tuple(
        tuple(d for d, letter in enumerate(of_array) if letter not in divides) for of_array in letters
    )


def _is_for_reverse(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name.startswith("custom_vjp") or any(map(_is_for_reverse, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _bounded(arrays: Sequence[Any], whole: Whole, work: KernelWork, of_tangents: KernelWork) -> Sequence[Any]:
    if not any(work) and not any(of_tangents) and not any(whole):
        return arrays
    return boundary_p.bind(*arrays, work=work, of_tangents=of_tangents, calls=1, whole=whole)


def _batch(args, dims, *, whole, calls, **params):
    rows = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    moved = tuple(
        of_array if dim is None else tuple(d + (d >= dim) for d in of_array)
        for of_array, dim in zip(whole, dims, strict=True)
    )
    return boundary_p.bind(*args, whole=moved, calls=calls * rows, **params), dims


def _linear(values: Sequence[Any], *, whole: Whole, **params: Any) -> list[Any]:
    live = [not isinstance(value, ad.Zero) for value in values]
    return bind_to_tangents(boundary_p, values, whole=tuple(itertools.compress(whole, live)), **params)


def _jvp(primals, tangents, *, of_tangents, **params):
    results = boundary_p.bind(*primals, of_tangents=of_tangents, **params)
    return results, _linear(tangents, **params | {"work": of_tangents, "of_tangents": NO_WORK})


def _transpose(cotangents, *args, **params):
    return _linear(cotangents, **params)


ad.primitive_jvps[boundary_p] = _jvp
ad.primitive_transposes[boundary_p] = _transpose
batching.primitive_batchers[boundary_p] = _batch
