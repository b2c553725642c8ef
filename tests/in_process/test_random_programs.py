"""Random programs compute what plain JAX computes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpmd
from tests.support.parity import assert_parity, mesh_of

WIDTH, BATCH = 3, 2
# Bounded, lest a step that overshoots turns rounding into chaos.
OPERATIONS = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "square": lambda h: jnp.tanh(h * h),
    "softmax": jax.nn.softmax,
    "mask": lambda h: jnp.where(jnp.arange(h.shape[-1]) > 0, h, 0.5),
    "checkpoint": jax.checkpoint(lambda h: jnp.sin(jnp.sin(h))),
    "jit": jax.jit(lambda h: jnp.cos(h) * 2),
    "scan": lambda h: jax.lax.scan(lambda c, _: (jnp.tanh(c), None), h, None, length=2)[0],
    "stop": lambda h: (h + jax.lax.stop_gradient(h)) / 2,
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a stage does: ``h = operation(h @ weight)``, plus what earlier stages made."""

    operation: str
    weight: int | None
    skip: int | None
    through_mark: bool
    auxiliary: bool
    frozen: bool


@dataclasses.dataclass(frozen=True)
class Program:
    stages: tuple[Stage, ...]
    groups: int
    microbatches: int
    schedule: str
    clip: bool
    integers: bool


@st.composite
def programs(draw):
    count = draw(st.integers(1, 5))
    stages = tuple(
        Stage(
            draw(st.sampled_from(sorted(OPERATIONS))),
            draw(st.one_of(st.none(), st.integers(0, 2))),
            draw(st.one_of(st.none(), st.integers(0, i - 1))) if i else None,
            draw(st.booleans()),
            draw(st.booleans()),
            draw(st.integers(0, 4)) == 0,
        )
        for i in range(count)
    )
    divisors = [g for g in range(1, count + 1) if count % g == 0]
    schedule = draw(st.sampled_from(["GPipe", "Std1F1B", "Eager1F1B", "Interleaved1F1B"]))
    groups = draw(st.sampled_from(divisors)) if schedule == "Interleaved1F1B" else count
    booleans = [draw(st.booleans()) for _ in range(2)]
    return Program(stages, groups, draw(st.integers(1, 5)), schedule, *booleans)


def loss_of(program):
    def loss(params, x):
        h, count = x, jnp.int32(0)
        made, auxiliary = [], 0.0
        for i, stage in enumerate(program.stages):
            if stage.weight is not None:
                w = params[stage.weight]
                h = h @ (jax.lax.stop_gradient(w) if stage.frozen else w)
            h = OPERATIONS[stage.operation](h)
            if stage.skip is not None:
                h = h + made[stage.skip]
            if stage.auxiliary:
                auxiliary += jnp.mean(h**2)
            before = h
            count += jnp.int32(h[0, 0] > 0)
            if i < len(program.stages) - 1:
                if program.integers:
                    h, count = mpmd.mark_stage_end((h, count))
                else:
                    h = mpmd.mark_stage_end(h)
            made.append(h if stage.through_mark else before)
        return jnp.mean(h**2) + auxiliary, (h, count)

    return loss


def step_of(program):
    num_stages = len(program.stages)
    if program.schedule == "Interleaved1F1B":
        schedule = mpmd.Interleaved1F1B(num_stages, program.groups)
    else:
        schedule = getattr(mpmd, program.schedule)(num_stages)
    loss = loss_of(program)

    def step(params, xs):
        (total, (last, counts)), grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss, has_aux=True)(params, x),
            xs,
            schedule=schedule,
            operation=((mpmd.Add, (mpmd.Concat(1), mpmd.Max)), mpmd.Add),
        )
        if program.clip:
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
            grads = [g / jnp.maximum(norm, 1.0) for g in grads]
        params = [p - 0.01 * g for p, g in zip(params, grads, strict=True)]
        return params, (total, last, counts, grads)

    return step


def check(program):
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / 2 for key in keys[:3]]
    xs = jax.random.normal(keys[3], (program.microbatches, BATCH, WIDTH))
    assert_parity(step_of(program), params, xs, mesh=mesh_of(program.groups), tolerance=1e-4)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs())
def test_random_programs(program):
    check(program)


@pytest.mark.slow
@pytest.mark.timeout(0)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_many_random_programs(program):
    check(program)
