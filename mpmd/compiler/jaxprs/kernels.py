"""Equations that run as one kernel, as ``mpmd.cost`` says."""

from __future__ import annotations

import collections
import re
from collections.abc import Container, Hashable, Iterable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import operands
from mpmd.compiler.jaxprs.source import is_transposed
from mpmd.language.kernels import KERNEL_SCOPE, boundary_p

Named = TypeVar("Named", bound=Hashable)

_JAX_NN = str(Path(jax.__file__).parent / "_src" / "nn")


class Kernel(NamedTuple):
    """The factors from the work of a kernel's equations to the work of the kernel.

    Attributes:
      forward, backward: the operations of the kernel over the operations of its equations.
      forward_bytes, backward_bytes: 1 if the kernel moves the bytes of its operands and results, 0 where
        ``mpmd.cost`` says how many bytes it moves.
      call: the number of the call, 0 if it has none.
      is_backward: whether the equation is in a backward of the kernel, by the equations around it.
    """

    forward: float
    backward: float
    forward_bytes: float = 1.0
    backward_bytes: float = 1.0
    call: int = 0
    is_backward: bool = False

    @property
    def factor(self) -> float:
        """The factor of the operations of the equation."""
        return self.backward if self.is_backward else self.forward

    @property
    def bytes_factor(self) -> float:
        """The factor of the bytes that the equation moves."""
        return self.backward_bytes if self.is_backward else self.forward_bytes


FLASH_ATTENTION = Kernel(1.0, 1.25)
"""Flash attention in place of the equations of ``jax.nn.dot_product_attention``: its backward has five
products, of which the equations have four (Dao et al., "FlashAttention", 2022, arXiv:2205.14135, section 3).
Masked scores count."""


class Around(NamedTuple):
    """The surroundings of an equation: its kernel, and whether they are of a backward."""

    kernel: Kernel | None = None
    is_backward: bool = False


NOTHING_AROUND = Around()


def kernel_around(eqn: JaxprEqn, around: Around, flash_attention: bool = False) -> Around:
    """Returns the surroundings of the equations in an equation's body; ``kernel`` is the equation's own, too.

    The name stacks of a body say nothing of the equations around it, so a body inherits their kernel.

    Args:
      flash_attention: whether ``jax.nn.dot_product_attention`` is a kernel.
    """
    kernel = _kernel_of(eqn) or around.kernel
    if kernel is None and flash_attention and _is_attention(eqn):
        kernel = FLASH_ATTENTION
    is_repeated = "rematted_computation" in str(eqn.source_info.name_stack)
    is_backward = (around.is_backward or is_transposed(eqn)) and not is_repeated
    return Around(kernel and kernel._replace(is_backward=is_backward), is_backward)


def _kernel_of(eqn: JaxprEqn) -> Kernel | None:
    """The kernel that the name of an equation has, under any transformations; ``None`` for most."""
    stack = str(eqn.source_info.name_stack)
    if KERNEL_SCOPE not in stack:
        return None
    names = [name for name in re.split(r"[/()]", stack) if name.startswith(f"{KERNEL_SCOPE}:")]
    if not names:
        return None
    *factors, call = names[-1].split(":")[1:]
    forward, backward, forward_bytes, backward_bytes = map(float, factors)
    return Kernel(forward, backward, forward_bytes, backward_bytes, int(call))


def _is_attention(eqn: JaxprEqn) -> bool:
    """Whether ``jax.nn.dot_product_attention`` has made an equation."""
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
    operations: Iterable[tuple[Kernel | None, Iterable[Named], Iterable[Named]]],
    kept: Iterable[Named] = (),
) -> KernelValues[Named]:
    """The values of operations, each of a kernel or of none, with the values that it reads and makes.

    Args:
      kept: values that are in memory anyway.
    """
    calls: dict[Named, set[int | None]] = collections.defaultdict(set)
    made, read = set[Named](), set[Named]()
    for kernel, reads, makes in operations:
        call = None if kernel is None else kernel.call
        made.update(makes := [*makes])
        read.update(reads := [*reads])
        for value in (*makes, *reads):
            calls[value].add(call)
    for value in kept:
        calls[value].add(None)
    touched = {value for value, of_value in calls.items() if of_value != {None}}
    inside = {value for value in touched & made & read if len(calls[value]) == 1}
    return KernelValues(frozenset(inside), frozenset(touched - inside))


class CallWork(NamedTuple):
    """The numbers that ``mpmd.cost`` has for the calls of a kernel."""

    operations: float = 0.0
    nbytes: float = 0.0


def call_work(eqn: JaxprEqn) -> CallWork | None:
    """The work of the calls whose operands an equation has; ``None`` for other equations."""
    if eqn.primitive is not boundary_p:
        return None
    work, calls, is_backward = (eqn.params[name] for name in ("work", "calls", "backward"))
    if work is None:
        return CallWork()
    numbers = work[2:] if is_backward else work[:2]
    return CallWork(*(calls * (number or 0.0) for number in numbers))


def operands_of(eqn: JaxprEqn, result: Var) -> list[Var]:
    """The variables of which an equation makes a result: of the operands of a kernel that one alone."""
    if eqn.primitive is not boundary_p:
        return operands(eqn)
    atom = eqn.invars[eqn.outvars.index(result)]
    return [atom] if isinstance(atom, Var) else []


def repeated(eqn: JaxprEqn, needed: Container[Var]) -> JaxprEqn:
    """An equation as it is computed once more for some of its results.

    The operands of a kernel are named once more, and the call is not: so it has no work.
    """
    if eqn.primitive is not boundary_p:
        return eqn
    kept = [i for i, var in enumerate(eqn.outvars) if var in needed]
    return eqn.replace(
        invars=[eqn.invars[i] for i in kept],
        outvars=[eqn.outvars[i] for i in kept],
        params={**eqn.params, "work": None, "whole": tuple(eqn.params["whole"][i] for i in kept)},
    )
