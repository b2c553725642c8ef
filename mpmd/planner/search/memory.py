"""The bytes that each layer needs on each device of its group."""

from __future__ import annotations

import dataclasses

import numpy as np

from mpmd.planner.search.columns import Array, Columns, Setting, product
from mpmd.planner.search.costs import DATA


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


def layer_bytes(columns: Columns, setting: Setting) -> LayerBytes:
    """The bytes of all layers on devices that run them as a setting says.

    Temporaries are what enters and its gradient, and what a task makes for itself, such as the scores of a
    vocabulary; with rematerialisation the residuals of the layer, which its backward computes again; with
    weights divided over ``data``, the whole weights and gradients of the layer. Those that are gathered once
    are there, whole, for the whole step.
    """
    held = product(columns.shares("weights", setting.sizes))
    shares = columns.shares("activations", setting.sizes)
    weights, gradients, state = (columns.of(name) * held for name in ("weights", "gradients", "state"))
    received = product(columns.shares("received", setting.sizes))
    entering = columns.of("entering") * columns.rows(setting) * received
    residuals = columns.of("residuals") * columns.rows(setting) * product(shares)
    within = np.maximum(columns.forward[-1], columns.backward[-1])
    temporaries = 2 * entering + within * columns.rows(setting) * product(shares)
    if not columns.profile.has_backward:
        gradients = residuals = np.zeros_like(weights)
    divided = setting.sizes[DATA] if setting.way.fsdp else 1
    gathered = np.zeros_like(weights)
    if setting.way.gather_once:
        gathered = weights
    elif setting.way.fsdp:
        temporaries = temporaries + weights + gradients
        gradients = gradients / divided
    if setting.way.remat:
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
