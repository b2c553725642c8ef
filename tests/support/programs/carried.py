"""What a microbatch hands to the next one: batch statistics, counts, keys."""

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
from tests.support.models import WIDTH, batch, descend, keys, layer, mlp, squares, stack, weights
from tests.support.programs.table import Case, program


def with_gradients(loss, params):
    """What ``treduce`` takes with a carry: the next carry, and the loss and the gradients."""

    def of_microbatch(carry, microbatch):
        (value, carry), grads = jax.value_and_grad(loss, has_aux=True)(params, carry, *microbatch)
        return carry, (value, grads)

    return of_microbatch


def case(loss, params, carry, schedule=None, data=None, **options):
    """Trains ``params`` with ``loss(params, carry, x, y)``, which returns the next carry, too."""
    schedule = schedule or mpmd.Std1F1B(3)

    def step(state, xs, ys):
        params, carry = state

        carry, (value, grads) = mpmd.treduce(
            with_gradients(loss, params),
            (xs, ys),
            schedule=schedule,
            operation=mpmd.Add,
            carry=carry,
        )
        return (descend(params, grads), carry), value

    return Case(step, (params, carry), data or batch(4), schedule.mpmd_dim, **options)


def statistics(stages):
    return [{"mean": jnp.zeros(4), "var": jnp.ones(4)} for _ in range(stages)]


def moved(old, new):
    return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new)


def batch_norm(h, running):
    """Normalises by the batch, and follows its statistics."""
    mean, var = h.mean(0), h.var(0)
    return (h - mean) * jax.lax.rsqrt(var + 1e-3), moved(running, {"mean": mean, "var": var})


def running_norm(h, running):
    """Normalises by what earlier microbatches had, which the backward reads, too."""
    seen = {"mean": h.mean(0), "var": h.var(0)}
    return (h - running["mean"]) * jax.lax.rsqrt(running["var"] + 1e-3), moved(running, seen)


def computed_again(h, running):
    """Under ``jax.checkpoint`` the backward reads the statistics that the forward had."""
    return jax.checkpoint(running_norm)(h, running)


def through(norm, stages=3):
    def loss(params, running, x, y):
        after, h = [], x
        for i in range(stages):
            h, new = norm(h @ params[i]["w"] + params[i]["b"], running[i])
            h = jnp.tanh(h)
            after.append(new)
            if i < stages - 1:
                h = mpmd.mark_stage_end(h)
        return squares(h, y), after

    return loss


def updated_on_their_stages(loaded):
    """Each stage's statistics are on its group alone."""
    for group in range(len(loaded.plan.programs)):
        read = [leaf.path for leaf in loaded.plan.inputs_of(group).values()]
        held = {path for path in read if path.startswith("args[0][1]")}
        assert held == {f"args[0][1][{group}][{name!r}]" for name in ("mean", "var")}


@program()
def normalised():
    return case(through(batch_norm), weights(3), statistics(3), holds=updated_on_their_stages)


@program(
    {
        "interleaved": mpmd.Interleaved1F1B(4, 2),
        "zero bubble": mpmd.ZeroBubble(4),
        "V": mpmd.DualPipeV(4, 2),
    },
)
def in_order(schedule):
    data = batch(8)
    return case(through(running_norm, 4), weights(4), statistics(4), schedule, data)


@program({"batch": batch_norm, "running": running_norm, "computed again": computed_again})
def of_scanned_layers(norm):
    """The statistics of all layers are one array, of which each group carries its own layers."""

    def loss(params, running, x, y):
        def body(h, layer):
            p, running = layer
            h, new = norm(h @ p["w"] + p["b"], running)
            return mpmd.mark_stage_end(jnp.tanh(h), every=(1, 3, 2)), new

        h, after = jax.lax.scan(body, x, (params, running))
        return squares(h, y), after

    def on_their_groups(loaded):
        held = {
            leaf.path: leaf.mpmd_idxs for leaf in loaded.plan.inputs if leaf.path.startswith("args[0][1]")
        }
        parts = {"[0:1]": (0,), "[1:4]": (1,), "[4:6]": (2,)}
        assert held == {
            f"args[0][1][{name!r}]{part}": groups
            for name in ("mean", "var")
            for part, groups in parts.items()
        }

    return case(loss, stack(weights(6)), stack(statistics(6)), holds=on_their_groups)


@program()
def over_a_sharded_batch():
    rows = jax.sharding.PartitionSpec(None, "fsdp")
    specs = (jax.sharding.PartitionSpec(), rows, rows)
    options = {"options": {"in_specs": specs}}
    return case(
        through(batch_norm, 2), weights(2), statistics(2), mpmd.Std1F1B(2), axes={"fsdp": 2}, **options
    )


@program()
def counts_and_keys():
    """What stages only read, or none reads, and values that are updated with one another."""

    def loss(params, carry, x, y):
        count, key, (a, b), frozen = carry
        h = x
        for i, p in enumerate(params):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.7, h.shape)
            h = layer(p, h) * kept * frozen
            if i < len(params) - 1:
                h = mpmd.mark_stage_end(h)
        after = (count + 1, jax.random.split(key)[0], (b, a + b + count), frozen)
        return squares(h, y) * (1 + 0.1 * count), after

    carry = (jnp.float32(0), keys(1)[0], (jnp.float32(1), jnp.float32(1)), jnp.ones(4))
    return case(loss, weights(3), carry)


@program()
def carried_by_backwards():
    """A running norm of a gradient scales the next microbatch's: it is read and updated in a backward."""

    def step(state, xs, ys):
        params, scale = state

        def of_microbatch(scale, microbatch):
            loss = through(lambda h, running: (h, running))
            (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, [None] * 3, *microbatch)
            norms = [jnp.sqrt(jnp.sum(g["w"] ** 2)) for g in grads]
            scaled = [jax.tree.map(lambda g, s=s: g / s, g) for g, s in zip(grads, scale, strict=True)]
            return [0.5 * s + 0.5 * n for s, n in zip(scale, norms, strict=True)], (value, scaled)

        scale, (value, grads) = mpmd.treduce(
            of_microbatch, (xs, ys), schedule=mpmd.Std1F1B(3), operation=mpmd.Add, carry=scale
        )
        return (descend(params, grads), scale), value

    return Case(step, (weights(3), [jnp.float32(1)] * 3), batch(4))


@program()
def constants_that_are_carried():
    """Flags, as of the first call of a normalisation layer, and numbers of every kind, made anew or kept."""
    first = {
        "flag": jnp.array(True),
        "bool": True,
        "int": 0,
        "float": 0.0,
        "numpy": np.float32(0),
        "numpy flag": np.bool_(True),
        "kept": 3.0,
    }
    later = {
        "flag": jnp.array(False),
        "bool": False,
        "int": 1,
        "float": 2.0,
        "numpy": np.float32(1),
        "numpy flag": np.bool_(False),
    }

    def step(state, xs, ys):
        def of_microbatch(carry, microbatch):
            mean, numbers = carry
            (value, seen), grads = jax.value_and_grad(loss, has_aux=True)(state, *microbatch)
            mean = jnp.where(numbers["flag"], seen, moved(mean, seen))
            return (mean, {**numbers, **later}), (value, grads)

        carry, (value, grads) = mpmd.treduce(
            of_microbatch, (xs, ys), mpmd.Std1F1B(3), operation=mpmd.Add, carry=(jnp.zeros(WIDTH), first)
        )
        return descend(state, grads), (value, carry)

    def loss(params, x, y):
        h = mlp(params, x)
        return squares(h, y), h.mean(0)

    return Case(step, weights(3), batch())
