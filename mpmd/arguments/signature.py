"""The kinds of a step's arguments: static, donated and ordinary ones."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from mpmd.arguments.call import Call
from mpmd.arguments.leaves import describe, fault_of
from mpmd.util.tracers import check_untraced
from mpmd.util.tree import argument_paths, broadcast_prefix
from mpmd.validation import is_int

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class NamedArguments(NamedTuple):
    """Arguments as ``jax.jit`` names them.

    Attributes:
      argnums: positions. Negative ones count from the last positional parameter that a call gives, by
        position or by name.
      argnames: names of arguments, which count where a call passes them by name.
    """

    argnums: tuple[int, ...]
    argnames: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CallSignature:
    """The static and the donated arguments of a step.

    Attributes:
      names: of the positional parameters, which may also be passed by name.
    """

    names: tuple[str, ...]
    static: NamedArguments
    donated: NamedArguments

    @classmethod
    def of(
        cls,
        fun: Callable,
        static_argnums: int | Iterable[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        donate_argnums: int | Iterable[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None,
    ) -> CallSignature:
        """The signature of a function.

        An argument that is named by position may be passed by name, and the other way round.

        Raises: ``ValueError`` for positions and names that ``fun`` does not have.
        """
        parameters = _parameters(fun)
        kinds = {parameter.kind for parameter in parameters}
        names = tuple(parameter.name for parameter in parameters if parameter.kind in _BY_POSITION)
        by_name = [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]
        faults: list[str] = []

        def checked(what: str, argnums: Any, argnames: Any) -> NamedArguments:
            argnums, argnames = listed(argnums), listed(argnames)
            wrong = [i for i in argnums if not -len(names) <= i < len(names)]
            if wrong and inspect.Parameter.VAR_POSITIONAL not in kinds:
                faults.append(
                    f"{what}_argnums has {wrong}, but the step takes {len(names)} positional arguments"
                )
            unknown = [name for name in argnames if name not in by_name]
            if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
                faults.append(f"{what}_argnames has {unknown}, but the step's arguments are {by_name}")
            positions = (names.index(name) for name in argnames if name in names)
            return NamedArguments((*argnums, *positions), argnames)

        static = checked("static", static_argnums, static_argnames)
        donated = checked("donate", donate_argnums, donate_argnames)
        if faults:
            raise ValueError("\n".join(faults))
        return cls(names, static, donated)

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> Call:
        """Flattens a call's arguments.

        Raises: ``TypeError`` for a leaf that is no array, ``ValueError`` for a static argument that is not
          hashable.
        """
        static, static_names = self.meant(self.static, args, kwargs)
        donated, donated_names = self.meant(self.donated, args, kwargs)
        if both := [*sorted(static & donated), *sorted(static_names & donated_names)]:
            raise ValueError(f"the arguments {both} are both static and donated")
        static_arguments: list[tuple[int | str, Any]] = [(i, args[i]) for i in sorted(static)]
        static_arguments += [(name, kwargs[name]) for name in sorted(kwargs) if name in static_names]
        _check_hashable(static_arguments)
        traced = [i for i in range(len(args)) if i not in static]
        traced_args = tuple(args[i] for i in traced)
        traced_kwargs = {name: value for name, value in kwargs.items() if name not in static_names}
        donations = (
            tuple(i in donated for i in traced),
            {name: name in donated_names for name in traced_kwargs},
        )
        leaves, treedef = jax.tree.flatten((traced_args, traced_kwargs))
        return Call(
            static=tuple(static_arguments),
            num_args=len(args),
            treedef=treedef,
            leaves=tuple(leaves),
            avals=_describe_all(leaves, traced_args, traced_kwargs),
            donated=tuple(
                broadcast_prefix(donations, (traced_args, traced_kwargs), lambda x: isinstance(x, bool))
            ),
        )

    def meant(
        self, arguments: NamedArguments, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[set[int], set[str]]:
        """The positions and the names of the arguments of a call that ``arguments`` mean."""
        num_positional = len(args) + sum(name in kwargs for name in self.names)
        from_start = {i if i >= 0 else i + num_positional for i in arguments.argnums}
        by_position = {i for i in from_start if 0 <= i < len(args)}
        by_name = {self.names[i] for i in from_start if len(args) <= i < len(self.names)}
        return by_position, by_name | {name for name in arguments.argnames if name in kwargs}


def listed(arguments: Any) -> tuple[Any, ...]:
    """Returns positions or names as a tuple, also a single one; for ``None``, an empty tuple."""
    if arguments is None:
        return ()
    return (arguments,) if isinstance(arguments, str) or is_int(arguments) else tuple(arguments)


def _describe_all(leaves: list[Any], args: tuple, kwargs: dict[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        check_untraced(zip(argument_paths(args, kwargs), leaves, strict=True))
    try:
        return tuple(map(describe, leaves))
    except TypeError:
        paths = argument_paths(args, kwargs)
        faults = [fault_of(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        raise TypeError("\n".join(filter(None, faults))) from None


def _check_hashable(static: Sequence[tuple[int | str, Any]]) -> None:
    for where, value in static:
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(
                f"the static argument {where!r} is a {type(value).__name__}, which is not hashable; "
                "arrays and pytrees of arrays cannot be static"
            ) from error


def _parameters(fun: Callable) -> list[inspect.Parameter]:
    """The parameters of ``fun``; ``*args`` and ``**kwargs`` for a callable that does not tell them."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (ValueError, TypeError):
        kinds = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return [inspect.Parameter(name, kind) for name, kind in kinds.items()]
