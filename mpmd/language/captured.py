"""Errors that name the arrays which a loss reads from around it, where its batch has to be an argument."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from mpmd.util.tables import first_few
from mpmd.util.tree import named_leaves


def nothing_to_cut(fun: Callable, args: tuple, kwargs: dict[str, Any], where: str) -> ValueError:
    fault = f"{where} has no array with rows to cut into microbatches"
    if captured := _captured(fun, args, kwargs):
        change = "Have it take the batch as an argument, and pass it by position"
        return ValueError(f"{fault}, but {_reads(fun, captured)}. {change}")
    return ValueError(
        f"{fault}: pass the batch by position, as arrays (np.asarray makes one of a list), and say with "
        "batch_argnums where it is"
    )


@contextlib.contextmanager
def captured_named(fun: Callable, args: tuple, kwargs: dict[str, Any], rows: int | None = None) -> Iterator:
    """Adds a note to errors of shapes that names the captured arrays with ``rows`` rows (``None``: any)."""
    try:
        yield
    except (TypeError, ValueError) as error:
        captured = [(name, array) for name, array in _captured(fun, args, kwargs) if name]
        if captured := [each for each in captured if rows in (None, each[1].shape[0])]:
            whole = "" if rows is None else f", with all {rows} rows of the batch"
            error.add_note(
                f"{_reads(fun, captured)}{whole}. If it is of the batch, have the function take it as an "
                "argument, and pass it by position"
            )
        raise


def _captured(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arrays with rows that ``fun`` reads besides ``args``, each with its variable ("" if none is known).

    NumPy arrays in a variable count as read: JAX reads a copy, which has another identity. No arrays are
    known of a function that fails of the whole batch, too, or whose variables have no value yet or are no
    pytrees: the error that is being raised then says all.
    """
    try:
        consts = jax.make_jaxpr(lambda: jax.tree.leaves(fun(*args, **kwargs)))().consts
        passed = {id(leaf) for leaf in jax.tree.leaves(args)}
        read = {id(const): const for const in consts if np.ndim(const) and id(const) not in passed}
        function = inspect.unwrap(fun)
        around = inspect.getclosurevars(function) if inspect.isfunction(function) else None
        variables = {**around.globals, **around.nonlocals, **kwargs} if around else kwargs
        named = {
            id(leaf): (path, leaf)
            for name, value in variables.items()
            for path, leaf in named_leaves(name, value)
            if id(leaf) in read or (isinstance(leaf, np.ndarray) and leaf.ndim and id(leaf) not in passed)
        }
    except Exception:  # of the user's function: the error that is being raised is the one to see
        return []
    return [*named.values()] or [("", const) for const in read.values()]


def _reads(fun: Callable, arrays: list[tuple[str, Any]]) -> str:
    avals = [(name, f"{array.dtype}{list(array.shape)}") for name, array in arrays]
    texts = [f"{name} ({aval})" if name else aval for name, aval in avals]
    return f"{getattr(fun, '__name__', type(fun).__name__)} reads {first_few(texts, 5)} from around it"
