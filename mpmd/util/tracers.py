"""Values that another transformation of JAX traces, which no step can take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


class TracedArgumentError(TypeError):
    """A value of a transformation of JAX that is under way was passed to a step."""


def check_untraced(named: Iterable[tuple[str, Any]]) -> None:
    """Checks the values that a step is called with, or closes over.

    Args:
      named: each value with its name to users.

    Raises: ``jax.errors.UnexpectedTracerError`` for a value that has leaked from a function that JAX has
      traced, with the line that has made it, and ``TracedArgumentError`` for one of a transformation under
        way.
    """
    for name, value in named:
        if isinstance(value, jax.core.Tracer):
            try:
                jax.jit(lambda x: x)(value)
            except jax.errors.UnexpectedTracerError as error:
                raise jax.errors.UnexpectedTracerError(f"{name} is a leaked tracer. {error}") from None
            raise TracedArgumentError(
                f"{name} is a traced array. A step compiled by mpmd.jit runs on groups of devices and cannot "
                "be traced: call it outside of jax.jit, jax.grad and jax.vmap, or transform the function it "
                "was made from"
            )
