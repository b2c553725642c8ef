"""Random number generator keys: in plans, messages and executables they are the integers inside."""

from __future__ import annotations

import functools
from typing import Any

import jax

from mpmd.compat import key_impl_name
from mpmd.ir.plan import Aval


def to_aval(var: Any) -> Aval:
    """The shape and dtype of a variable's value in the plan, where keys are their raw data.

    Args:
      var: a variable, or an object with an attribute ``aval``.
    """
    return _in_plan(var.aval)


@functools.lru_cache(maxsize=4096)  # steps of many layers have values of few types
def _in_plan(aval: Any) -> Aval:
    described = raw(aval)
    return Aval(tuple(described.shape), str(described.dtype), described.dtype.itemsize)


def is_key(aval: Any) -> bool:
    return _of_keys(aval.dtype)


@functools.cache  # each result of each step asks
def _of_keys(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def raw(aval: Any) -> jax.ShapeDtypeStruct:
    """The abstract value as the plan has it: keys as the integers inside."""
    described = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.eval_shape(jax.random.key_data, described) if is_key(aval) else described


def encode(value: Any) -> Any:
    return jax.random.key_data(value) if is_key(value) else value


def decode(value: Any, aval: Any) -> Any:
    return jax.random.wrap_key_data(value, impl=key_impl_name(aval.dtype)) if is_key(aval) else value
