"""Names the arguments whose sizes differ where JAX refuses a scan; JAX says the sizes alone."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpmd.compiler.jaxprs.source import SourceLines
from mpmd.errors import CompileError
from mpmd.util.tree import argument_paths

_JAX_SAYS = re.compile(r"scan got (values with different leading axis sizes: |`length` argument of )[^.\n]*")
_MOST_NAMED = 4


def unequal_layers(error: ValueError, args: tuple, kwargs: dict[str, Any]) -> CompileError | None:
    """The error for arrays of other numbers of layers than their scan has; ``None`` for another error.

    Args:
      error: the error that JAX has raised while it traced a step of ``args`` and ``kwargs``.
    """
    match = _JAX_SAYS.match(str(error))
    if match is None:
        return None
    sizes = sorted({int(number) for number in re.findall(r"\d+", match[0])}, reverse=True)
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves((args, kwargs))]
    named = list(zip(argument_paths(args, kwargs), shapes, strict=True))
    lists = {size: [path for path, shape in named if shape[:1] == (size,)] for size in sizes}
    arguments = "; ".join(f"{size} in {_listed(paths)}" for size, paths in lists.items() if paths)
    return CompileError(
        f"the scan at {_line(error)} takes a slice of each array in each iteration, but {match[0]}. "
        + (f"Of the step's arguments, the first axis has {arguments}. " if arguments else "")
        + "Stack what layers have of their own once for each layer, along the first axis; the body reads "
        "what all layers share from outside of the scan"
    )


def _listed(paths: Sequence[str]) -> str:
    more = len(paths) - _MOST_NAMED
    return ", ".join(paths[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _line(error: ValueError) -> str:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    origin = SourceLines.among((frame.filename, frame.lineno or 0, frame.name) for frame in frames)
    return str(origin or "an unknown line")
