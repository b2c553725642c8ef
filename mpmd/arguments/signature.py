"""How the arguments of a step are passed: which are static, which are donated."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mpmd.arguments.call import Call
from mpmd.arguments.leaves import describe, fault_of
from mpmd.tree import argument_paths, broadcast_prefix


@dataclasses.dataclass(frozen=True)
class CallSignature:
    """Which arguments of a step are static and which are donated, by position and by name."""

    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]

    @classmethod
    def of(
        cls,
        fun: Callable,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        donate_argnums: tuple[int, ...],
    ) -> CallSignature:
        """An argument that is named by position may be passed by name, and the other way round.

        Raises: ``ValueError`` for positions that ``fun`` does not have.
        """
        names = _positional_names(fun)
        for what, positions in (("static_argnums", static_argnums), ("donate_argnums", donate_argnums)):
            wrong = [i for i in positions if not -len(names) <= i < len(names)]
            if wrong and not _takes_any_number(fun):
                raise ValueError(f"{what} has {wrong}, but the step takes {len(names)} positional arguments")
        by_name = {names[i] for i in static_argnums if -len(names) <= i < len(names)}
        by_position = {names.index(name) for name in static_argnames if name in names}
        donated = {names[i] for i in donate_argnums if -len(names) <= i < len(names)}
        return cls(
            static_argnums=(*static_argnums, *by_position),
            static_argnames=(*static_argnames, *by_name),
            donate_argnums=donate_argnums,
            donate_argnames=tuple(donated),
        )

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> Call:
        """Flattens a call's arguments.

        Raises: ``TypeError`` for a leaf that is no array, ``ValueError`` for a static argument that is not
          hashable.
        """
        static = _positions(self.static_argnums, len(args))
        donated = _positions(self.donate_argnums, len(args))
        if both := static & donated:
            raise ValueError(f"the arguments {sorted(both)} are both static and donated")
        static_args = tuple((i, args[i]) for i in sorted(static))
        static_kwargs = tuple((name, kwargs[name]) for name in sorted(kwargs) if name in self.static_argnames)
        _check_hashable((*static_args, *static_kwargs))
        traced = [i for i in range(len(args)) if i not in static]
        traced_args = tuple(args[i] for i in traced)
        traced_kwargs = {name: value for name, value in kwargs.items() if name not in self.static_argnames}
        donations = (
            tuple(i in donated for i in traced),
            {name: name in self.donate_argnames for name in traced_kwargs},
        )
        leaves, treedef = jax.tree.flatten((traced_args, traced_kwargs))
        return Call(
            static_args=static_args,
            static_kwargs=static_kwargs,
            num_args=len(args),
            treedef=treedef,
            leaves=tuple(leaves),
            avals=_describe_all(leaves, traced_args, traced_kwargs),
            donated=tuple(broadcast_prefix(donations, (traced_args, traced_kwargs), _is_bool)),
        )


def _positions(argnums: tuple[int, ...], num_args: int) -> set[int]:
    """The positions that a call with so many positional arguments has; negative ones count from the end."""
    return {i % num_args for i in argnums if -num_args <= i < num_args}


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool)


def _describe_all(leaves: list[Any], args: tuple, kwargs: dict[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes and dtypes of the leaves of the traced arguments. Raises as ``bind``."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            "a step compiled by mpmd_jit_with_loop runs on groups of devices and cannot be traced: call "
            "it outside of jax.jit, jax.grad and jax.vmap, or transform the function it was made from"
        )
    try:
        return tuple(map(describe, leaves))
    except TypeError:
        paths = argument_paths(args, kwargs)
        faults = [fault_of(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        raise TypeError("\n".join(filter(None, faults))) from None


def _check_hashable(static: tuple[tuple[int | str, Any], ...]) -> None:
    for where, value in static:
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(
                f"the static argument {where!r} is a {type(value).__name__}, which is not hashable; "
                "arrays and pytrees of arrays cannot be static"
            ) from error


def _takes_any_number(fun: Callable) -> bool:
    """Whether ``fun`` may take more positional arguments than those with names."""
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in _parameters(fun))


def _positional_names(fun: Callable) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in _parameters(fun) if parameter.kind in positional]


def _parameters(fun: Callable) -> list[inspect.Parameter]:
    """The parameters of ``fun``; ``*args`` for a callable that does not tell them."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (ValueError, TypeError):
        return [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
