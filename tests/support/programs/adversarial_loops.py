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
from tests.support.programs.table import Case, descend, program


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


@program()
def adversarial_loops_over_the_same_stages():
    """Both loops pass both networks; the discriminator's loss has a frozen generator."""

    def step(state, xs, noise):
        generator, discriminator = state

        def through_both(generator, discriminator, z):
            h = layer(generator[0], z)
            h = mpmd.mark_stage_end(layer(generator[1], mpmd.mark_stage_end(h)))
            return jnp.mean(layer(discriminator, h), -1)

        def of_discriminator(discriminator, z, x):
            real = jnp.mean(layer(discriminator, x), -1)
            fake = through_both(lax.stop_gradient(generator), discriminator, z)
            return jnp.mean(jax.nn.softplus(fake) + jax.nn.softplus(-real))

        lost, grads = gradients(of_discriminator, discriminator, (noise, xs), mpmd.Std1F1B(3))
        discriminator = descend(discriminator, grads)
        fooled, grads = gradients(
            lambda g, z: jnp.mean(jax.nn.softplus(-through_both(g, discriminator, z))),
            generator,
            (noise,),
            mpmd.ZeroBubble(3),
        )
        return (descend(generator, grads), discriminator), (lost, fooled)

    def holds(loaded):
        assert homes_of(loaded, "args[0]") == [(0,), (0,), (1,), (1,), (2,), (2,)]

    params = weights(3)
    return Case(step, (params[:2], params[2]), batch(), steps=3, holds=holds)
