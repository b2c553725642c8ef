"""Moves arguments by as much as rounding moves the results of computations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from mpmd.compiler.jaxprs.equations import all_eqns, aval_of


def coarsest_rounding(jaxprs: Iterable[Jaxpr]) -> float:
    """The largest ``eps`` of the floating-point types in which jaxprs compute; 0 if all is integers."""
    different = {id(jaxpr): jaxpr for jaxpr in jaxprs}.values()
    made = (var for jaxpr in different for eqn in all_eqns(jaxpr.eqns) for var in eqn.outvars)
    dtypes = {aval_of(var).dtype for var in made if hasattr(var.aval, "dtype")}
    return max(map(eps_of, dtypes), default=0.0)


def eps_of(dtype: Any) -> float:
    """The distance from 1 to the next number of a type; 0 for integers, booleans and keys."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def perturbed(leaves: Sequence[Any], rounding: float, seed: int) -> list[Any]:
    """The leaves with every number a little larger or smaller, by its last digit or by ``rounding``.

    Whole numbers stay, in arrays of floats too: these are masks, counts and scales, which are exact.
    """
    draws = np.random.default_rng(seed)
    return [_perturbed(leaf, rounding, draws) for leaf in leaves]


def _perturbed(leaf: Any, rounding: float, draws: np.random.Generator) -> Any:
    if not isinstance(leaf, np.ndarray) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    wide = leaf.astype(np.complex128 if np.iscomplexobj(leaf) else np.float64)
    if np.all(wide == np.round(wide)):
        return leaf
    signs = draws.choice([-1.0, 1.0], leaf.shape)
    return (wide * (1 + max(rounding, eps_of(leaf.dtype)) * signs)).astype(leaf.dtype)


def on_host(leaf: Any) -> Any:
    """A copy of a leaf as a numpy array; keys as a jax array, and Python numbers as they are."""
    if isinstance(leaf, bool | int | float | complex):
        return leaf
    return jnp.copy(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.array(leaf)
