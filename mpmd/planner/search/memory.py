"""The bytes that each layer needs on each device of its group."""

from __future__ import annotations

import dataclasses

import numpy as np

from mpmd.planner.search.costs import DATA
from mpmd.planner.search.layer_arrays import Array, GroupSettings, LayerArrays, product


@dataclasses.dataclass(frozen=True)
class LayerBytes:
    """Bytes of each layer on each device.

    Attributes:
      weights, gradients, state: for the whole step.
      residuals: of one microbatch, from its forward to its backward.
      entering: of one microbatch, what comes from the layers before.
      temporaries: while the layer's backward runs, beside these.
    """

    weights: Array
    gradients: Array
    state: Array
    residuals: Array
    entering: Array
    temporaries: Array


def layer_bytes(arrays: LayerArrays, group: GroupSettings) -> LayerBytes:
    """The bytes of all layers on devices that run them as a setting says.

    Temporaries are what enters and its gradient, and what a task makes for itself, such as the scores of a
    vocabulary; with rematerialisation the residuals of the layer, which its backward computes again; with
    weights divided over ``data``, the whole weights and gradients of the layer. Those that are gathered once
    are there, whole, for the whole step.
    """
    held = product(arrays.shares("weights", group.sizes))
    shares = arrays.shares("activations", group.sizes)
    weights, gradients, state = (arrays.of(name) * held for name in ("weights", "gradients", "state"))
    received = product(arrays.shares("received", group.sizes))
    entering = arrays.of("entering") * arrays.rows(group) * received
    residuals = arrays.of("residuals") * arrays.rows(group) * product(shares)
    within = np.maximum(arrays.forward[-1], arrays.backward[-1])
    temporaries = 2 * entering + within * arrays.rows(group) * product(shares)
    if not arrays.profile.has_backward:
        gradients = residuals = np.zeros_like(weights)
    divided = group.sizes[DATA] if group.step.fsdp else 1
    gathered = np.zeros_like(weights)
    if group.step.gather_once:
        gathered = weights
    elif group.step.fsdp:
        temporaries = temporaries + weights + gradients
        gradients = gradients / divided
    if group.step.remat:
        temporaries = temporaries + residuals
        residuals = np.minimum(entering, residuals)
    return LayerBytes(
        weights=weights / divided + gathered,
        gradients=gradients,
        state=state / divided,
        residuals=residuals,
        entering=entering,
        temporaries=temporaries,
    )
