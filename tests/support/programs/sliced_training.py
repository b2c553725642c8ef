"""Training steps over slices of the sequence: what codes do besides attention."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import CLIPPED_ADAM, init
from tests.support.programs.sliced_models import (
    LENGTH,
    attention_layer,
    bounds_of,
    decoder,
    embedded,
    schedule_of,
    sliced_loss,
    token_batch,
    token_losses,
    train_slices,
)
from tests.support.programs.table import Case, descend, program


@program()
def slices_with_a_tied_embedding():
    params = decoder()
    del params["head"]
    return train_slices(sliced_loss(), params, optimizer=CLIPPED_ADAM)


POLICIES = {
    "all": None,
    "products": jax.checkpoint_policies.dots_saveable,
    "no batched products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@program(POLICIES)
def slices_with_remat(policy):
    def layer(p, h, carried, start):
        return jax.checkpoint(attention_layer, policy=policy, static_argnums=3)(p, h, carried, start)

    return train_slices(sliced_loss(layer), optimizer=CLIPPED_ADAM)


@program()
def slices_with_remat_of_the_loss():
    return train_slices(jax.checkpoint(sliced_loss()))


KEYS = {"typed": lambda: jax.random.key(1), "raw": lambda: jax.random.PRNGKey(1)}


@program(KEYS)
def slices_with_dropout(make_key):
    """A key for each slice and layer, folded of one for the microbatch."""

    def loss(params, tokens, targets, key):
        def layer(p, h, carried, start):
            h, carried = attention_layer(p, h, carried, start)
            own = jax.random.fold_in(jax.random.fold_in(key, start), len(carried))
            return h * jax.random.bernoulli(own, 0.8, h.shape) / 0.8, carried

        return sliced_loss(layer)(params, tokens, targets)

    def step(state, xs, ys):
        params, key = state
        key, own = jax.random.split(key)
        total, grads = mpmd.treduce_i(
            lambda i: jax.value_and_grad(loss)(params, xs[i], ys[i], jax.random.fold_in(own, i)),
            len(xs),
            schedule_of(),
            mpmd.Add,
        )
        return (descend(params, grads), key), (total, grads)

    return Case(step, (decoder(), make_key()), token_batch(), 2)


@program()
def slices_with_dropout_at_positions():
    """Masks do not depend on the slices: they are drawn for the sequence, and cut."""

    def loss(params, tokens, targets):
        key = jax.random.fold_in(jax.random.key(0), tokens[0, 0])
        kept = jax.random.bernoulli(key, 0.8, (2, *tokens.shape))

        def layer(p, h, carried, start):
            h, carried = attention_layer(p, h, carried, start)
            return h * kept[0, :, start : start + h.shape[1], None] / 0.8, carried

        return sliced_loss(layer)(params, tokens, targets)

    return train_slices(loss)


@program({"written out": False, "remat": True})
def slices_of_scanned_layers(remat):
    """Each stage scans over its layers, and the keys of these are stacked."""

    def loss(params, tokens, targets):
        bounds, total = bounds_of(2), 0.0
        chunks = [[], []]
        for start, (x, y) in zip(bounds[:-1], mpmd.slices((tokens, targets), bounds), strict=True):
            h = embedded(params, x, start)
            for stage in range(2):
                layers = jax.tree.map(lambda leaf, s=stage: leaf[2 * s : 2 * s + 2], params["stack"])

                def body(h, layer, start=start):
                    p, before = layer
                    h, carried = attention_layer(p, h, list(before), start)
                    return h, carried[-1]

                body = jax.checkpoint(body) if remat else body
                h, own = lax.scan(body, h, (layers, tuple(chunks[stage])))
                chunks[stage].append(own)
                if stage == 0:
                    h = mpmd.mark_stage_end(h)
            total += token_losses(params, h, y).sum()
        return total / targets.size

    params = decoder(4)
    layers = params.pop("layers")
    params["stack"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return train_slices(loss, params, slices=2, optimizer=CLIPPED_ADAM)


@program()
def slices_of_scans_with_marks():
    """One scan over all layers in each slice, with a mark in its body."""

    def loss(params, tokens, targets):
        bounds, total, chunks = bounds_of(2), 0.0, []
        for start, (x, y) in zip(bounds[:-1], mpmd.slices((tokens, targets), bounds), strict=True):

            def body(h, layer, start=start):
                p, before = layer
                h, carried = attention_layer(p, h, list(before), start)
                return mpmd.mark_stage_end(h, num_stages=2), carried[-1]

            h, own = lax.scan(body, embedded(params, x, start), (params["stack"], tuple(chunks)))
            chunks.append(own)
            total += token_losses(params, h, y).sum()
        return total / targets.size

    params = decoder(4)
    params["stack"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.pop("layers"))
    return train_slices(loss, params, slices=2, optimizer=CLIPPED_ADAM)


@program(["mean", "sum"])
def slices_of_a_batch_in_microbatches(reduction):
    """A batch of rows, by ``mpmd.value_and_grad``."""

    def step(state, tokens, targets):
        params, opt_state = state
        differentiate = mpmd.value_and_grad(
            sliced_loss(), num_microbatches=3, schedule=schedule_of(), reduction=reduction
        )
        loss, grads = differentiate(params, tokens, targets)
        updates, opt_state = CLIPPED_ADAM.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, grads)

    batch = jax.tree.map(lambda leaf: leaf.reshape(-1, LENGTH), token_batch())
    return Case(step, init(decoder(), CLIPPED_ADAM), batch, 2)


@program({"of the batch": True, "of the model": False})
def slices_with_a_normaliser_of_all_tokens(of_batch):
    """Tokens are weighted, by a mask or by what the model makes of them; the loss is a weighted mean."""

    def loss(params, batch, targets):
        bounds, carried, total, weight = bounds_of(3), [None, None], 0.0, 0.0
        pieces = mpmd.slices((batch["tokens"], batch["mask"], targets), bounds)
        for start, (x, mask, y) in zip(bounds[:-1], pieces, strict=True):
            h = embedded(params, x, start)
            for i, p in enumerate(params["layers"]):
                h, carried[i] = attention_layer(p, h, carried[i], start)
                if i == 0:
                    h = mpmd.mark_stage_end(h)
            weights = mask if of_batch else jax.nn.sigmoid(h @ params["weigh"])
            total += (token_losses(params, h, y) * weights).sum()
            weight += weights.sum()
        return total / weight

    tokens, targets = token_batch()
    mask = jnp.float32(jax.random.bernoulli(jax.random.key(2), 0.7, tokens.shape))
    params = decoder(weigh=jnp.linspace(-1, 1, 8))
    return train_slices(loss, params, data=({"tokens": tokens, "mask": mask}, targets))


SCHEDULES = {
    "one microbatch": (1, {}),
    "five microbatches": (5, {}),
    "eager": (3, {"eager": True}),
    "split backwards": (3, {"split_backward": True}),
}


@program(SCHEDULES, usual={"split backwards"})
def schedules_of_slices(microbatches_and_schedule):
    microbatches, options = microbatches_and_schedule
    return train_slices(sliced_loss(), data=token_batch(microbatches), schedule=options)


@program({"whole": {}, "split": {"split_backward": True}}, usual={"whole"})
def slices_on_groups_of_two_stages(options):
    params = decoder(4)
    schedule = {"mpmd_dim": 2, **options}
    return train_slices(sliced_loss(slices=2, stages=4), params, 4, 2, schedule=schedule)


@program()
def slices_on_three_groups():
    """Two layers in the first stages, one in the last."""
    return train_slices(sliced_loss(stages=3), decoder(5), 3, optimizer=CLIPPED_ADAM)


@program()
def slices_with_a_mark_behind_the_last_stage():
    """The mark after the last stage, which is allowed."""

    def loss(params, tokens, targets):
        bounds, carried, total = bounds_of(3), [None, None], 0.0
        for start, (x, y) in zip(bounds[:-1], mpmd.slices((tokens, targets), bounds), strict=True):
            h = embedded(params, x, start)
            for i, p in enumerate(params["layers"]):
                h, carried[i] = attention_layer(p, h, carried[i], start)
                h = mpmd.mark_stage_end(h)
            total += token_losses(params, h, y).sum()
        return total / targets.size

    return train_slices(loss)


@program({"weights": True, "activations": False})
def slices_in_bfloat16(low_weights):
    """bfloat16 throughout, or in the products alone."""
    dtype = jnp.bfloat16 if low_weights else jnp.float32

    def loss(params, tokens, targets):
        cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return sliced_loss()(cast, tokens, targets)

    return train_slices(loss, decoder(dtype=dtype), tolerance=0.05)


@program()
def slices_with_scores_of_all_tokens():
    """Losses of each token, and hidden states of each slice, as auxiliary output."""

    def loss(params, tokens, targets):
        bounds, carried, losses, states = bounds_of(3), [None, None], [], []
        for start, (x, y) in zip(bounds[:-1], mpmd.slices((tokens, targets), bounds), strict=True):
            h = embedded(params, x, start)
            for i, p in enumerate(params["layers"]):
                h, carried[i] = attention_layer(p, h, carried[i], start)
                if i == 0:
                    states.append(h.mean())
                    h = mpmd.mark_stage_end(h)
            losses.append(token_losses(params, h, y))
        losses = jnp.concatenate(losses, 1)
        return losses.mean(), {"losses": losses, "states": states}

    def step(params, xs, ys):
        (total, aux), grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss, has_aux=True)(params, *mb),
            (xs, ys),
            schedule_of(),
            operation=((mpmd.Add, mpmd.Concat()), mpmd.Add),
        )
        return descend(params, grads), (total, aux)

    return Case(step, decoder(), token_batch(), 2)


@program()
def slices_with_gradients_clipped_by_microbatch():
    def step(params, xs, ys):
        def clipped(mb):
            loss, grads = jax.value_and_grad(sliced_loss())(params, *mb)
            norm = optax.tree.norm(grads)
            return loss, jax.tree.map(lambda g: g / jnp.maximum(norm, 0.1), grads)

        total, grads = mpmd.treduce(clipped, (xs, ys), schedule_of(), operation=mpmd.Add)
        return descend(params, grads), (total, grads)

    return Case(step, decoder(), token_batch(), 2)


@program()
def slices_with_a_count_that_each_microbatch_carries():
    """A carry of the loop, which the last slice of the last stage updates once per microbatch."""

    def step(state, xs, ys):
        params, mean = state

        def of_microbatch(mean, mb):
            loss, grads = jax.value_and_grad(sliced_loss())(params, *mb)
            return 0.9 * mean + 0.1 * loss, (loss, grads)

        mean, (total, grads) = mpmd.treduce(
            of_microbatch, (xs, ys), schedule_of(), operation=mpmd.Add, carry=mean
        )
        return (descend(params, grads), mean), (total, grads)

    return Case(step, (decoder(), jnp.float32(1)), token_batch(), 2)


@program()
def slices_with_frozen_layers():
    def loss(params, tokens, targets):
        first, *others = params["layers"]
        frozen = {**params, "layers": [lax.stop_gradient(first), *others]}
        return sliced_loss()({**frozen, "embed": lax.stop_gradient(params["embed"])}, tokens, targets)

    return train_slices(loss, optimizer=CLIPPED_ADAM)


@program()
def slices_with_several_predictions():
    """A second head predicts the token after the next one."""

    def loss(params, tokens, targets):
        bounds, carried, total = bounds_of(3), [None, None], 0.0
        later = jnp.roll(targets, -1, -1)
        for start, (x, y, z) in zip(bounds[:-1], mpmd.slices((tokens, targets, later), bounds), strict=True):
            h = embedded(params, x, start)
            for i, p in enumerate(params["layers"]):
                h, carried[i] = attention_layer(p, h, carried[i], start)
                if i == 0:
                    h = mpmd.mark_stage_end(h)
            second = {**params, "head": params["second"]}
            total += token_losses(params, h, y).sum() + token_losses(second, h, z).sum() / 2
        return total / targets.size

    params = decoder()
    return train_slices(loss, {**params, "second": params["head"] * 0.5})


@program()
def slices_one_row_at_a_time():
    """The loss of a row, mapped over the rows."""

    def loss(params, tokens, targets):
        of_row = jax.vmap(lambda x, y: sliced_loss()(params, x[None], y[None]))
        return of_row(tokens, targets).mean()

    return train_slices(loss)


@program()
def slices_of_inputs_that_are_differentiated():
    """Embeddings are the batch, and their gradients are a result."""

    def step(params, xs, ys):
        def loss(params, x, y):
            bounds, carried, total = bounds_of(3), [None, None], 0.0
            for start, (h, targets) in zip(bounds[:-1], mpmd.slices((x, y), bounds), strict=True):
                for i, p in enumerate(params["layers"]):
                    h, carried[i] = attention_layer(p, h, carried[i], start)
                    if i == 0:
                        h = mpmd.mark_stage_end(h)
                total += token_losses(params, h, targets).sum()
            return total / y.size

        def of_microbatch(mb):
            loss_value, (grads, of_inputs) = jax.value_and_grad(loss, (0, 1))(params, *mb)
            return loss_value, grads, of_inputs

        total, grads, of_inputs = mpmd.treduce(
            of_microbatch, (xs, ys), schedule_of(), operation=(mpmd.Add, mpmd.Add, mpmd.Concat())
        )
        return descend(params, grads), (total, of_inputs)

    tokens, targets = token_batch()
    params = decoder()
    return Case(step, params, (np.asarray(params["embed"])[tokens], targets), 2)


@program({"rows": True, "weights": False})
def slices_on_groups_of_two_devices(by_rows):
    """Data parallel, or with weights in shards."""
    rows = P(None, "fsdp") if by_rows else P()
    state = init(decoder(), CLIPPED_ADAM)
    weights = jax.tree.map(lambda leaf: P("fsdp") if leaf.ndim == 2 and len(leaf) % 2 == 0 else P(), state)
    specs = (P() if by_rows else weights, rows, rows)
    options = {"in_specs": specs}
    return train_slices(sliced_loss(), optimizer=CLIPPED_ADAM, axes={"fsdp": 2}, options=options)
