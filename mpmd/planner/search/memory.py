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
      weights, gradients, state: held for the whole step.
      residuals: of one microbatch, held from its forward to its backward.
      entering: of one microbatch, received from the layers before.
      temporaries: held while the layer's backward runs, beside these.
    """

    weights: Array
    gradients: Array
    state: Array
    residuals: Array
    entering: Array
    temporaries: Array


def layer_bytes(arrays: LayerArrays, group: GroupSettings) -> LayerBytes:
    """The bytes of all layers on the devices of a group.

    Temporaries are the entering values with their gradients, and values within a task, such as the scores of
    a vocabulary. With rematerialisation they include all residuals of the layer, some of which its backward
    computes again; with weights divided over ``data``, the layer's whole weights and gradients. Weights that
    are gathered once are held whole for the whole step.
    """
    held = product(arrays.shares("weights", group.sizes))
    shares = arrays.shares("activations", group.sizes)
    weights, gradients, state = (arrays.of(name) * held for name in ("weights", "gradients", "state"))
    received = product(arrays.shares("received", group.sizes))
    entering = arrays.of("entering") * arrays.rows(group) * received
    residuals = arrays.of("residuals") * arrays.rows(group) * product(shares)
    within = np.maximum(arrays.forward.temporaries, arrays.backward.temporaries)
    temporaries = 2 * entering + within * arrays.rows(group) * product(shares)
    if not arrays.profile.has_backward:
        gradients = residuals = np.zeros_like(weights)
    divided = group.sizes[DATA] if group.fsdp else 1
    gathered = np.zeros_like(weights)
    if group.gather_once:
        gathered = weights
    elif group.fsdp:
        temporaries = temporaries + weights + gradients
        gradients = gradients / divided
    kept = arrays.recomputed(group.remat).residuals
    entered = np.minimum(kept, arrays.of("entering"))
    of_policy = (entered * received + (kept - entered) * product(shares)) * arrays.rows(group)
    is_less = kept < arrays.of("residuals")
    temporaries = temporaries + np.where(is_less, residuals, 0.0)
    residuals = np.where(is_less, np.minimum(of_policy, residuals), residuals)
    return LayerBytes(
        weights=weights / divided + gathered,
        gradients=gradients,
        state=state / divided,
        residuals=residuals,
        entering=entering,
        temporaries=temporaries,
    )
