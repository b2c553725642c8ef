"""Puts functions under ``jax.checkpoint``: the user's, which were opened, and layers, as a plan says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from mpmd.language.remat import Remat

Function = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class RematOptions:
    """The options of ``jax.checkpoint`` around a function."""

    policy: Any
    prevent_cse: Any = True

    @classmethod
    def by_policy(cls, policy: Remat) -> RematOptions | None:
        """Options whose policy has the same name in ``jax.checkpoint_policies``."""
        return None if policy is Remat.NONE else cls(getattr(jax.checkpoint_policies, policy.value))


def under_remat(function: ClosedJaxpr, options: RematOptions | None) -> Function:
    """The function under ``jax.checkpoint``, or as it is for ``None``."""
    run = jaxpr_as_fun(function)
    if options is None:
        return run
    return jax.checkpoint(run, policy=options.policy, prevent_cse=options.prevent_cse)
