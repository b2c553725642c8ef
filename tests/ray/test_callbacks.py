"""Callbacks and contexts of JAX's configuration, where groups are other processes than the driver."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.errors import NonFiniteError
from tests.support.models import batch, init, layer, make_step, weights
from tests.support.parity import assert_close

SCHEDULE = mpmd.Std1F1B(2)


def compiled_for(mesh, loss, **options):
    step = make_step(loss, SCHEDULE)
    return step, mpmd.jit(step, mpmd_mesh=mesh, **options), (init(weights(2)), *batch())


def test_the_driver_calls_in_the_order_of_the_step(four_groups, capfd):
    seen = []

    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        jax.debug.callback(lambda h: seen.append(np.asarray(h)), h, ordered=True)
        jax.debug.print("the first is {h:.3f}", h=h[0, 0])
        out = jnp.mean((layer(params[1], h) - y) ** 2)
        value = jax.lax.stop_gradient(out)
        io_callback(lambda v: seen.append(np.asarray(v)), None, value, ordered=True)
        return out

    step, compiled, args = compiled_for(four_groups, loss)
    expected = jax.block_until_ready(jax.jit(step)(*args))
    jax.effects_barrier()
    wanted = seen.copy()
    printed = capfd.readouterr().out.splitlines()
    for _ in range(2):
        seen.clear()
        assert_close(jax.block_until_ready(compiled(*args)), expected)
        assert len(seen) == len(wanted) == 8
        for one, other in zip(seen, wanted, strict=True):
            assert_close(one, other)
        lines = [line for line in capfd.readouterr().out.splitlines() if "first" in line]
        assert lines == [f"[stage 1, microbatch {i}] {line}" for i, line in enumerate(printed)]


def in_while(h):
    def body(carry):
        i, h = carry
        jax.debug.print("{}", i)
        return i + 1, jnp.tanh(h)

    return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, jax.lax.stop_gradient(h)))[1]


REFUSED = {
    "debug_print": in_while,
    "io_callback": lambda h: io_callback(np.asarray, h, jax.lax.stop_gradient(h)),
    "pure_callback": lambda h: jax.pure_callback(np.asarray, h, jax.lax.stop_gradient(h)),
}


@pytest.mark.slow
def test_what_runs_only_here_is_refused_naming_its_lines(four_groups):
    def loss(params, x, y):
        h = mpmd.mark_stage_end(layer(params[0], x))
        h = h + sum(0 * part(h) for part in REFUSED.values())
        return jnp.mean((layer(params[1], h) - y) ** 2)

    _, compiled, args = compiled_for(four_groups, loss)
    with pytest.raises(ValueError, match="run only where the step was traced") as caught:
        compiled(*args)
    for name in REFUSED:
        assert f"{name} at {__file__}:" in str(caught.value)


@pytest.mark.slow
def test_groups_of_several_processes_call_once_with_the_whole_value(two_process_groups):
    seen = []

    def loss(params, x, y):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), x, ordered=True)
        h = mpmd.mark_stage_end(layer(params[0], x))
        return jnp.mean((jnp.log(layer(params[1], h)) - y) ** 2)

    specs = (None, P(None, "fsdp"), P(None, "fsdp"))
    _, compiled, args = compiled_for(two_process_groups, loss, in_specs=specs)
    jax.block_until_ready(compiled(*args))
    assert_close(np.stack(seen), args[1])
    with jax.debug_nans(True), pytest.raises(NonFiniteError, match="on group 1 made a value with nan"):
        jax.block_until_ready(compiled(*args))
    jax.block_until_ready(compiled(*args))
    assert len(seen) >= 2 * len(args[1])
