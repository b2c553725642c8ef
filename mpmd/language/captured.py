"""Errors that name the arrays which a loss reads from around it, where its batch has to be an argument."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mpmd.util.tables import first_few

_SHOWN = 5
"""Arrays that an error names."""

_Captured = tuple[str, str, Any]
"""The variable that holds an array ("" if unknown), the path in it, such as ``['x']``, and the array."""


def nothing_to_cut(fun: Callable, args: tuple, kwargs: dict[str, Any], where: str) -> ValueError:
    """Returns the error of a call without an array to cut into microbatches among the arguments ``where``."""
    fault = f"{where} has no array with rows to cut into microbatches"
    try:
        captured, cause = _captured_arrays(fun, args, kwargs), None
    except Exception as error:
        captured, cause = [], error
    if captured:
        change = f"Have it take the batch as an argument, and pass it by position:{_change(fun, captured)}"
        return ValueError(f"{fault}, but {_reads(fun, captured)}. {change}")
    plain = ValueError(
        f"{fault}: pass the batch by position, as arrays (np.asarray makes one of a list), and say with "
        "batch_argnums where it is"
    )
    plain.__cause__ = cause
    return plain


@contextlib.contextmanager
def captured_named(fun: Callable, args: tuple, kwargs: dict[str, Any], rows: int | None = None) -> Iterator:
    """Adds a note to errors of shapes that names the captured arrays with ``rows`` rows (``None``: any)."""
    try:
        yield
    except (TypeError, ValueError) as error:
        try:
            captured = _captured_arrays(fun, args, kwargs)
        except Exception:  # the loss fails of the whole batch, too, and that is the error that is raised
            captured = []
        # Arrays that no variable holds are tables that the function makes for itself.
        if captured := [each for each in captured if each[0] and rows in (None, each[2].shape[0])]:
            whole = "" if rows is None else f", with all {rows} rows of the batch"
            error.add_note(
                f"{_reads(fun, captured)}{whole}. If it is of the batch, have the function take it as "
                f"an argument, and pass it by position:{_change(fun, captured)}"
            )
        raise


def _captured_arrays(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> list[_Captured]:
    """Returns the arrays with rows that ``fun(*args, **kwargs)`` reads besides ``args``.

    NumPy arrays in a variable count as read: JAX reads a copy, which has another identity.
    """
    passed = {id(leaf) for leaf in jax.tree.leaves(args)}
    consts = jax.make_jaxpr(lambda: jax.tree.leaves(fun(*args, **kwargs)))().consts
    read = {id(const): const for const in consts if np.ndim(const) and id(const) not in passed}
    named = {
        id(leaf): (name, jax.tree_util.keystr(path), leaf)
        for name, value in {**_variables(fun), **kwargs}.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
        if id(leaf) in read or (isinstance(leaf, np.ndarray) and leaf.ndim and id(leaf) not in passed)
    }
    return [*named.values()] or [("", "", const) for const in read.values()]


def _variables(fun: Callable, with_callees: bool = True) -> dict[str, Any]:
    """Returns the variables around a function and around its callees, and the arguments of a ``partial``."""
    if isinstance(fun, functools.partial):
        bound = dict(zip(inspect.signature(fun.func).parameters, fun.args, strict=False))
        return {**_variables(fun.func), **bound, **fun.keywords}
    around = inspect.getclosurevars(inspect.unwrap(fun))
    variables = {**around.globals, **around.nonlocals}
    for callee in [*variables.values()] if with_callees else ():
        if isinstance(callee, types.FunctionType):
            variables = {**_variables(callee, with_callees=False), **variables}
    return variables


def _reads(fun: Callable, arrays: Sequence[_Captured]) -> str:
    avals = [(name + path, f"{array.dtype}{list(array.shape)}") for name, path, array in arrays]
    texts = [f"{name} ({aval})" if name else aval for name, aval in avals]
    return f"{_name(fun)} reads {first_few(texts, _SHOWN)} from around it"


def _change(fun: Callable, arrays: Sequence[_Captured]) -> str:
    """Returns the two lines to change; arrays with the commonest number of rows become arguments."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(fun).parameters.values()
    listed = [each.name for each in parameters if each.kind in by_position and each.default is each.empty]
    ((rows, _),) = collections.Counter(array.shape[0] for _, _, array in arrays).most_common(1)
    batch = [name or "batch" for name, _, array in arrays if array.shape[0] == rows]
    text = ", ".join(dict.fromkeys([*listed, *batch]))
    name = _name(fun)
    if name == "<lambda>":
        return f"\n    mpmd.value_and_grad(lambda {text}: ..., ...)({text})"
    return f"\n    def {name}({text}): ...\n    mpmd.value_and_grad({name}, ...)({text})"


def _name(fun: Callable) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)
