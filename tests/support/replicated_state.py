"""A step whose argument both of two groups read and hold afterwards."""

import jax.numpy as jnp

import mpmd


def on_both_groups(v, xs):
    """Returns ``v``, which both stages read, and a sum."""

    def task(x):
        return jnp.sum(mpmd.mark_stage_end(x * v) * v)

    return v, mpmd.treduce(task, xs, schedule=mpmd.ForwardOnly(2, 2), operation=mpmd.Add)
