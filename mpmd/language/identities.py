"""Primitives that compute the identity, by which functions tell the compiler something about values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, mlir


def identity(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **params: args)
    primitive.def_abstract_eval(lambda *avals, **params: avals)
    mlir.register_lowering(primitive, lambda ctx, *args, **params: args)
    return primitive


def bind_to_tangents(primitive: Primitive, tangents: Sequence[Any], **params: Any) -> list[Any]:
    """Binds an identity to tangents or cotangents. Symbolic zeros, as of integers and keys, pass by."""
    live = [tangent for tangent in tangents if not isinstance(tangent, ad.Zero)]
    results = iter(primitive.bind(*live, **params) if live else ())
    return [tangent if isinstance(tangent, ad.Zero) else next(results) for tangent in tangents]
