"""A train step whose arrays take tens of megabytes, and the most memory that a process has for it.

Run as a program, it compares schedules on one group of this process's devices: it prints, as JSON, the bytes
that the plan says the process needs and the most that it took, by the name of each case.
"""

import gc
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.parity import mesh_of

ROWS, WIDTH, INPUTS, MICROBATCHES = 2**16, 128, 8, 4
"""An activation takes 32 MiB, more than what malloc may keep for later when it is freed."""

ADAM = optax.adam(1e-3)
SHARDED = (P(), P(None, "data"))


def loss(params, x):
    h = jnp.tile(x, (1, WIDTH // INPUTS))
    for i, stage in enumerate(params):
        h = jnp.tanh(h @ stage["w"] + jnp.mean(stage["table"]))
        if i < len(params) - 1:
            h = mpmd.mark_stage_end(h)
    return jnp.mean(h**2)


def make_step(schedule):
    def step(state, xs):
        params, opt_state = state
        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(params, x), xs, schedule=schedule)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def initial_state(stages):
    """Each stage has a small weight and one of 8 MiB."""
    shapes = {"w": (WIDTH, WIDTH), "table": (1024, 2048)}
    params = [{name: np.full(s, 0.01, np.float32) for name, s in shapes.items()} for _ in range(stages)]
    return params, jax.tree.map(np.asarray, ADAM.init(params))


def inputs():
    return np.ones((MICROBATCHES, ROWS, INPUTS), np.float32)


def arguments(schedule):
    """What a step takes, by shape and dtype."""
    arrays = (initial_state(schedule.num_stages), inputs())
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)


def status(field):
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most since ``forget_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def compare(schedule, devices, in_specs=None):
    """What the report says that this process needs for a step, and what it takes."""
    with mesh_of(schedule.mpmd_dim, data=devices) as mesh:
        step = mpmd.jit(make_step(schedule), mpmd_mesh=mesh, in_specs=in_specs, donate_argnums=0).compile(
            *arguments(schedule)
        )
        gc.collect()
        before = status("VmRSS")
        state = initial_state(schedule.num_stages)
        for _ in range(3):
            forget_peak()
            state, value = step(state, inputs())
            value.block_until_ready()
            jax.tree.map(lambda array: array.block_until_ready(), state)
        taken = status("VmHWM") - before
        return step.report().groups[0].process_bytes, taken


if __name__ == "__main__":
    cases = {
        "InterleavedGPipe": (mpmd.InterleavedGPipe(2, mpmd_dim=1), 1),
        "Interleaved1F1B": (mpmd.Interleaved1F1B(2, mpmd_dim=1), 1),
        "Interleaved1F1B, sharded": (mpmd.Interleaved1F1B(2, mpmd_dim=1), 2, SHARDED),
    }
    print(json.dumps({name: compare(*case) for name, case in cases.items()}))
