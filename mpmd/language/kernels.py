"""``mpmd.cost``: says that a function is one kernel, for plans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax

from mpmd.validation import callable_fault, number_fault, raise_faults

KERNEL_SCOPE = "mpmd.cost"
"""The beginning of the name of a kernel in name stacks."""

Function = TypeVar("Function", bound=Callable)


def cost(fun: Function, *, forward: float = 1.0, backward: float = 1.0) -> Function:
    """Says that a function runs as one kernel, so that ``mpmd.plan`` knows its cost.

    ::

        attention = mpmd.cost(functools.partial(jax.nn.dot_product_attention, is_causal=True), backward=1.25)

    The function computes what it did. A plan counts its operands and results as memory traffic and not the
    values between them, which are no residuals either: the backward computes them again. So a plan needs no
    device that has the kernel: plan with the equations of a reference implementation, run with the kernel.
    Dimensions divide as those of the equations. It may be differentiated, mapped, rematerialised and scanned.

    Args:
      fun: of arrays.
      forward, backward: the operations of the kernel's forward and backward over those of the equations. A
        flash attention without a mask has the backward 1.25, since it computes the scores again.

    Raises: ``TypeError`` for what is no function or no number; ``ValueError`` for numbers that are negative
      or infinite.
    """
    raise_faults(
        callable_fault("fun", fun),
        number_fault("forward", forward, least=0, finite=True),
        number_fault("backward", backward, least=0, finite=True),
        title="mpmd.cost: ",
    )
    scope = f"{KERNEL_SCOPE}:{float(forward)!r}:{float(backward)!r}"

    def kernel(*args, **kwargs):
        with jax.named_scope(scope):
            return fun(*args, **kwargs)

    return functools.update_wrapper(kernel, fun)  # type: ignore[return-value]
