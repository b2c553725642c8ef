"""A function under ``jax.checkpoint``, by the policies of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from mpmd.language.remat import Remat

Function = Callable[..., list[Any]]

SAVEABLE = {
    Remat.DOTS_SAVEABLE: jax.checkpoint_policies.dots_saveable,
    Remat.DOTS_WITH_NO_BATCH_DIMS_SAVEABLE: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    Remat.NOTHING_SAVEABLE: None,
}
"""The ``policy=`` of ``jax.checkpoint`` around a whole layer."""


def rematerialised(function: ClosedJaxpr, policy: Remat, prevent_cse: bool = True) -> Function:
    """A function of which the backward computes again what a policy does not keep."""
    if policy is Remat.NONE:
        return jaxpr_as_fun(function)
    return jax.checkpoint(jaxpr_as_fun(function), policy=SAVEABLE[policy], prevent_cse=prevent_cse)
