"""What happens to the gradients after the loop."""

import jax
import jax.numpy as jnp
import optax

from tests.support.models import SGD, batch, descend, mse, weights
from tests.support.programs.table import Case, program, train, trains

EPS = 1e-3  # so that gradients near zero do not make Adam's first steps arbitrary
ADAM = optax.adam(1e-2, eps=EPS)


def by_path(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "weights" if "'w'" in str(path) else "biases", params
    )


OPTIMIZERS = {
    "muon": optax.contrib.muon(1e-2),
    "prodigy": optax.contrib.prodigy(1e-1, eps=EPS),
    "schedule free": optax.contrib.schedule_free_sgd(0.1),
    "noisy": optax.chain(optax.add_noise(0.1, 0.55, 0), SGD),
    "one rate per kind": optax.multi_transform({"weights": SGD, "biases": ADAM}, by_path),
}


@program(OPTIMIZERS)
def trained_with(optimizer):
    def holds(loaded):
        held = [group.parameter_bytes for group in loaded.report().groups]
        # Norms, counters and keys are everywhere.
        assert max(held) - min(held) <= 128, f"the groups hold {held} bytes"

    return train(mse, weights(3), optimizer=optimizer, holds=holds)


@program()
def layers_swapped_after_the_update():
    """What a group gets back is another group's weight."""

    def step(state, xs, ys):
        total, grads = trains(state, (xs, ys))
        return descend(state, grads)[::-1], total

    return Case(step, weights(3), batch())


@program()
def weights_initialised_in_the_step():
    """Parameters that are no arguments at all."""

    def step(state, xs, ys):
        params = jax.tree.map(lambda p: p * state, weights(3))
        total, grads = trains(params, (xs, ys))
        return state + jnp.mean(grads[0]["w"]), (total, grads)

    return Case(step, jnp.float32(1.0), batch())
