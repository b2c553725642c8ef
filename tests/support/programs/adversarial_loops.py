"""Loops that train against one another."""

import jax
import jax.numpy as jnp
from jax import lax

import mpmd
from tests.support.models import (
    CLIPPED_ADAM,
    batch,
    layer,
    mlp,
    weights,
)
from tests.support.programs.passes import homes_of
from tests.support.programs.several_loops import ADAM, gradients, stages_of, updated
from tests.support.programs.table import Case, program


@program()
def generative_adversarial_network():
    """The discriminator learns first; the generator then learns from the discriminator as it is after that.

    The second loop has the generator's stages and then the discriminator's, which are where the first loop
    has them, so no weight is on two groups.
    """

    def judged(discriminator, x):
        return jnp.mean(mlp(discriminator, x), -1)

    def step(state, xs, noise):
        generator, discriminator, moments = state

        def loss_of_discriminator(discriminator, x, fake):
            return jnp.mean(
                jax.nn.softplus(-judged(discriminator, x)) + jax.nn.softplus(judged(discriminator, fake))
            )

        fakes = jax.vmap(lambda z: mlp_without_marks(generator, z))(noise)
        lost, grads = gradients(
            loss_of_discriminator, discriminator, (xs, lax.stop_gradient(fakes)), mpmd.GPipe(2)
        )
        discriminator, ours = updated(discriminator, moments[1], grads, CLIPPED_ADAM)

        def loss_of_generator(generator, z):
            fake = mpmd.mark_stage_end(mlp(generator, z))
            return jnp.mean(jax.nn.softplus(-judged(discriminator, fake)))

        fooled, grads = gradients(loss_of_generator, generator, (noise,), mpmd.Std1F1B(4))
        generator, theirs = updated(generator, moments[0], grads)
        return (generator, discriminator, (theirs, ours)), (lost, fooled)

    def holds(loaded):
        assert stages_of(loaded) == [("GPipe", 2, 4), ("Std1F1B", 4, 4)]
        assert homes_of(loaded, "args[0][1]") == [(0,), (0,), (1,), (1,)]
        assert {homes[0] for homes in homes_of(loaded, "args[0][0]")} >= {2, 3}

    generator, discriminator = weights(4)[:2], weights(4)[2:]
    moments = ADAM.init(generator), CLIPPED_ADAM.init(discriminator)
    return Case(step, (generator, discriminator, moments), batch(), groups=4, steps=3, holds=holds)


def mlp_without_marks(params, x):
    for p in params:
        x = layer(p, x)
    return x
