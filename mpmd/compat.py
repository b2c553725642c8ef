"""What JAX has no public name for. Nothing else in the project reaches below JAX's public modules."""

from __future__ import annotations


def key_impl_name(dtype) -> str:
    """The name of the random number generator of a key dtype, as ``jax.random.wrap_key_data`` takes it.

    ``jax.random.key_impl`` answers this for arrays only, not for the abstract values of a jaxpr.
    """
    return dtype._impl.name
