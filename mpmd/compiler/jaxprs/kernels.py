"""Equations that run as one kernel, as ``mpmd.cost`` says."""

from __future__ import annotations

import re
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from mpmd.language.kernels import KERNEL_SCOPE


class Kernel(NamedTuple):
    """The operations of a kernel over those of its equations, in the forward and in the backward."""

    forward: float
    backward: float

    def factor(self, eqn: JaxprEqn, kind: str) -> float:
        """The factor of an equation in a task of a kind; a backward may compute a forward again."""
        is_repeated = "rematted_computation" in str(eqn.source_info.name_stack)
        return self.forward if kind == "fwd" or is_repeated else self.backward


def kernel_of(eqn: JaxprEqn) -> Kernel | None:
    """The kernel that an equation belongs to, under any transformations; ``None`` for most."""
    stack = str(eqn.source_info.name_stack)
    if KERNEL_SCOPE not in stack:
        return None
    names = [name for name in re.split(r"[/()]", stack) if name.startswith(f"{KERNEL_SCOPE}:")]
    if not names:
        return None
    _, forward, backward = names[-1].split(":")
    return Kernel(float(forward), float(backward))
