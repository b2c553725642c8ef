"""Equations that run as one kernel: attention, and functions for which ``mpmd.cost`` says so."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.source import is_transposed
from mpmd.language.kernels import Kernel, KernelWork, boundary_p

Named = TypeVar("Named", bound=Hashable)

_JAX_NN = str(Path(jax.__file__).parent / "_src" / "nn")

_FLASH_FORWARD, _FLASH_BACKWARD = 1.0, 1.25
"""The factors of flash attention in place of ``jax.nn.dot_product_attention``.

Its backward has five products, of which the equations have four (Dao et al., "FlashAttention", 2022,
arXiv:2205.14135, section 3). Masked scores count.
"""


class KernelCall(NamedTuple):
    """A call of a kernel, and its work over the work of one of its equations.

    Attributes:
      kernel: ``None``: flash attention.
      number: of the call; 0 for flash attention.
      factor, bytes_factor: of the operations, and of the bytes that the equation moves.
    """

    kernel: Kernel | None
    number: int
    factor: float
    bytes_factor: float = 1.0


class Around(NamedTuple):
    kernel: KernelCall | None = None
    is_backward: bool = False


NOTHING_AROUND = Around()


def kernel_of(eqn: JaxprEqn) -> Kernel | None:
    policy = eqn.params.get("policy")
    return policy if isinstance(policy, Kernel) else None


def kernel_around(eqn: JaxprEqn, around: Around, flash_attention: bool) -> Around:
    """Returns the surroundings of the equations in an equation's body; ``kernel`` is the equation's own, too.

    The name stacks of a body say nothing of the equations around it, so a body inherits their surroundings.

    Args:
      flash_attention: whether ``jax.nn.dot_product_attention`` is a kernel.
    """
    if kernel := kernel_of(eqn):
        return Around(KernelCall(kernel, id(eqn), kernel.factor, kernel.bytes_factor))
    is_repeated = "rematted_computation" in str(eqn.source_info.name_stack)
    is_backward = (around.is_backward or is_transposed(eqn)) and not is_repeated
    call = around.kernel
    if call is not None and call.kernel is not None:
        if call.kernel.is_backward and is_repeated:  # of the forward, which the kernel's factor has
            call = call._replace(factor=0.0)
    elif call is not None or (flash_attention and _is_attention(eqn)):
        call = KernelCall(None, 0, _FLASH_BACKWARD if is_backward else _FLASH_FORWARD)
    return Around(call, is_backward)


def _is_attention(eqn: JaxprEqn) -> bool:
    traceback = eqn.source_info.traceback
    return traceback is not None and any(
        frame.function_name == "dot_product_attention" and frame.file_name.startswith(_JAX_NN)
        for frame in traceback.frames
    )


class KernelValues(NamedTuple, Generic[Named]):
    """The values that kernels make or read.

    Attributes:
      inside: the values that only one call, or its backward, both computes and reads. They are in no memory.
      operands: the kernels' operands and results in memory.
    """

    inside: frozenset[Named]
    operands: frozenset[Named]


NO_KERNEL_VALUES: KernelValues[Any] = KernelValues(frozenset(), frozenset())


def kernel_values(
    operations: Iterable[tuple[KernelCall | None, Iterable[Named], Iterable[Named]]],
    kept: Iterable[Named] = (),
) -> KernelValues[Named]:
    """The values of operations, each of a kernel or of none, with the values that it reads and makes.

    Args:
      kept: values that are in memory anyway.
    """
    calls: dict[Named, set[int | None]] = collections.defaultdict(set)
    made, read = set[Named](), set[Named]()
    for kernel, reads, makes in operations:
        call = None if kernel is None else kernel.number
        made.update(makes := [*makes])
        read.update(reads := [*reads])
        for value in (*makes, *reads):
            calls[value].add(call)
    for value in kept:
        calls[value].add(None)
    touched = {value for value, of_value in calls.items() if of_value != {None}}
    inside = {value for value in touched & made & read if len(calls[value]) == 1}
    return KernelValues(frozenset(inside), frozenset(touched - inside))


def call_work(eqn: JaxprEqn) -> KernelWork | None:
    """The work of the calls whose operands an equation has; ``None`` for other equations."""
    if eqn.primitive is not boundary_p:
        return None
    return KernelWork(*(eqn.params["calls"] * number for number in eqn.params["work"]))
