"""The arrays that a function reads from around it, by the names that its user gave them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mpmd.util.tables import first_few

_SHOWN = 5
"""The number of arrays that an error names."""

_DEEP = 3
"""The number of functions, each called by the one before, in which names are looked up."""


@dataclasses.dataclass(frozen=True)
class CapturedArray:
    """An array with rows that a function reads, and that is none of its arguments.

    Attributes:
      variable: the name of the variable that holds it; ``None`` if none is known.
      path: the position within the variable, such as ``['x']``.
      shape: its first axis may be the rows of a batch.
    """

    variable: str | None
    path: str
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        aval = f"{self.dtype}{list(self.shape)}"
        return aval if self.variable is None else f"{self.variable}{self.path} ({aval})"


def captured_arrays(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> list[CapturedArray]:
    """The arrays with rows that ``fun(*args, **kwargs)`` reads besides ``args``, in the order of reading.

    These are variables of the functions around it and of its module, what ``functools.partial`` binds,
    attributes of a method's object, and arguments that are passed by name.

    Raises: the errors of ``fun``.
    """
    passed = {id(leaf) for leaf in jax.tree.leaves(args)}
    read = jax.make_jaxpr(lambda: jax.tree.leaves(fun(*args, **kwargs)))().consts
    leaves = (*_leaves_of_each(kwargs), *_captured_leaves(fun))
    return [
        CapturedArray(*_name_in(leaves, array), shape=tuple(array.shape), dtype=array.dtype)
        for array in read
        if id(array) not in passed and np.ndim(array)
    ]


def _name_in(leaves: Sequence[tuple[str, str, Any]], array: Any) -> tuple[str | None, str]:
    """The variable that holds an array, and where in it. JAX has copies of arrays of numpy."""
    same = ((name, path) for name, path, leaf in leaves if leaf is array or _is_copied(leaf, array))
    return next(same, (None, ""))


def _is_copied(leaf: Any, array: Any) -> bool:
    return (
        isinstance(leaf, np.ndarray)
        and not isinstance(array, jax.core.Tracer)
        and not jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
        and leaf.shape == array.shape
        and np.array_equal(leaf, array)
    )


def nothing_to_cut(fun: Callable, args: tuple, kwargs: dict[str, Any], where: str) -> ValueError:
    """The error of a call that has no array to cut into microbatches.

    Args:
      where: the arguments among which there is none.
    """
    fault = f"{where} has no array with rows to cut into microbatches"
    plain = ValueError(
        f"{fault}: pass the batch by position, as arrays (np.asarray makes one of a list), and say with "
        "batch_argnums where it is"
    )
    try:
        captured = captured_arrays(fun, args, kwargs)
    except Exception as error:
        plain.__cause__ = error
        return plain
    if not captured:
        return plain
    captured = [array for array in captured if array.variable] or captured
    return ValueError(
        f"{fault}, but {_reads(fun, captured)}. Have it take the batch as an argument, and pass it by "
        f"position:{_change(fun, captured)}"
    )


@contextlib.contextmanager
def captured_named(fun: Callable, args: tuple, kwargs: dict[str, Any], rows: int | None = None) -> Iterator:
    """A context whose errors of shapes have a note that names captured arrays.

    Args:
      rows: the number of rows that these have, that of the batch; ``None``: any.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        try:
            captured = captured_arrays(fun, args, kwargs)
        except Exception:  # the loss fails of the whole batch, too, and that is the error that is raised
            captured = []
        # Arrays without a name are tables that the function makes for itself.
        if captured := [array for array in captured if array.variable and rows in (None, array.shape[0])]:
            whole = "" if rows is None else f", with all {rows} rows of the batch"
            error.add_note(
                f"{_reads(fun, captured)}{whole}. If it is of the batch, have the function take it as "
                f"an argument, and pass it by position:{_change(fun, captured)}"
            )
        raise


def _reads(fun: Callable, arrays: Sequence[CapturedArray]) -> str:
    return f"{name_of(fun)} reads {first_few(map(str, arrays), _SHOWN)} from around it"


def _change(fun: Callable, arrays: Sequence[CapturedArray]) -> str:
    """The two lines that a user changes for the batch among the arrays to be an argument."""
    parameters = _names(fun, with_defaults=False)
    batch = _batch_variables(arrays)
    listed = ", ".join([*parameters, *(name for name in batch if name not in parameters)])
    name = name_of(fun)
    if name == "<lambda>":
        return f"\n    mpmd.value_and_grad(lambda {listed}: ..., ...)({listed})"
    return f"\n    def {name}({listed}): ...\n    mpmd.value_and_grad({name}, ...)({listed})"


def name_of(fun: Callable) -> str:
    """The name of a function in messages."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def _batch_variables(arrays: Sequence[CapturedArray]) -> list[str]:
    """The names of the variables that are probably the batch: the most that have equally many rows."""
    rows: dict[str, set[int]] = {}
    for array in arrays:
        rows.setdefault(array.variable or "batch", set()).add(array.shape[0])
    votes = collections.Counter(next(iter(sizes)) for sizes in rows.values() if len(sizes) == 1)
    most = max(votes, key=lambda size: votes[size], default=None)
    return [name for name, sizes in rows.items() if sizes == {most}] or list(rows)


def _names(fun: Callable, *, with_defaults: bool) -> list[str]:
    """The names of the parameters that may be passed by position.

    Args:
      with_defaults: whether those with defaults are among them.
    """
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # a callable that is not written in Python has no signature
        return [] if with_defaults else ["params"]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        each.name
        for each in parameters
        if each.kind in by_position and (with_defaults or each.default is each.empty)
    ]


def _leaves_of_each(variables: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The name of the variable, the path in it and the leaf, for each array in variables."""
    for name, value in variables.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            keys = jax.tree_util.keystr(path)
            if isinstance(leaf, jax.Array | np.ndarray):
                yield name, keys, leaf
            elif hasattr(leaf, "__dict__") and not callable(leaf) and not isinstance(leaf, types.ModuleType):
                for attribute, (inner, array) in _arrays_of(leaf):
                    yield name, f"{keys}.{attribute}{inner}", array


def _arrays_of(value: Any) -> Iterator[tuple[str, tuple[str, Any]]]:
    """The arrays in the attributes of an object that is no pytree."""
    for attribute, held in vars(value).items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(held):
            if isinstance(leaf, jax.Array | np.ndarray):
                yield attribute, (jax.tree_util.keystr(path), leaf)


def _captured_leaves(fun: Any, depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """The arrays that a function may read from around it, and those of the functions that it calls."""
    if isinstance(fun, functools.partial):
        yield from _leaves_of_each(_bound(fun))
        yield from _captured_leaves(fun.func, depth)
        return
    fun = inspect.unwrap(fun)
    if isinstance(fun, types.MethodType):
        yield from _leaves_of_each({"self": fun.__self__})
    fun = getattr(fun, "__func__", fun)
    if not isinstance(fun, types.FunctionType):
        return
    variables = _variables(fun)
    yield from _leaves_of_each(variables)
    if depth < _DEEP:
        for value in variables.values():
            if callable(value):
                yield from _captured_leaves(value, depth + 1)


def _variables(fun: types.FunctionType) -> dict[str, Any]:
    """The variables of a function that are not its own: of functions around it, and of its module."""
    of_module = {name: fun.__globals__[name] for name in fun.__code__.co_names if name in fun.__globals__}
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    return {**of_module, **{name: cell.cell_contents for name, cell in cells if _is_assigned(cell)}}


def _is_assigned(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _bound(bound: functools.partial) -> dict[str, Any]:
    """The arguments that ``functools.partial`` binds, by their names."""
    names = _names(bound.func, with_defaults=True)
    return {**dict(zip(names, bound.args, strict=False)), **bound.keywords}
