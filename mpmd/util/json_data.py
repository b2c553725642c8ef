"""Frozen data as JSON and back, by the types of its fields. Nothing that is read is executed.

A dataclass is an object with its fields; a named tuple, tuple or set is a list; a mapping is a list of pairs,
or an object if its keys are text; a type that prints as text which parses back is that text. Where a field
may hold several dataclasses, the object has one key: the name of the class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from mpmd.validation import cut, shown

Json = Any

_PLAIN = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    types.NoneType: "null",
}
"""Types that JSON has, each with its name in messages."""


class JsonFormat:
    """Writes and reads data of certain types.

    Args:
      texts: for each type, or union of types, that is written as text, the function that undoes ``str`` and
        raises ``ValueError`` for other texts.
      by_hand: whether people write the data that are loaded: fields with defaults may be left out, and
        ``null`` is an infinite number.
    """

    def __init__(self, texts: Mapping[Any, Callable[[str], Any]], by_hand: bool = False):
        self._texts, self._by_hand = texts, by_hand

    def dump(self, hint: Any, value: Any) -> Json:
        if hint in self._texts:
            return str(value)
        if hint in _PLAIN:
            return value
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            member = next(member for member in args if _is_of(member, value))
            data = self.dump(member, value)
            return {member.__name__: data} if member.__name__ in _named_classes(args) else data
        if _is_dataclass(hint):
            return {name: self.dump(each, getattr(value, name)) for name, each in _fields(hint).items()}
        if _is_mapping(origin):
            if args[0] is str:
                return {key: self.dump(args[1], item) for key, item in value.items()}
            return [self.dump(types.GenericAlias(tuple, args), pair) for pair in value.items()]
        if _is_uniform(origin, args):
            return [self.dump(args[0], item) for item in (sorted(value) if origin is frozenset else value)]
        return [self.dump(each, item) for each, item in zip(_members(hint), value, strict=True)]

    def load(self, hint: Any, data: Json) -> Any:
        """The value of type ``hint``. Raises ``ValueError`` that names the place of the first fault."""
        return self._load(hint, data, "")

    def _load(self, hint: Any, data: Json, place: str) -> Any:
        if hint in self._texts:
            return self._load_text(hint, data, place)
        if hint is float and data is None and self._by_hand:
            return math.inf
        if hint in _PLAIN:
            is_right = _is_plain(hint, data) and (hint is not float or abs(data) <= sys.float_info.max)
            _check(is_right, _PLAIN[hint], data, place)
            return float(data) if hint is float else data
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._load_union(args, data, place)
        if _is_dataclass(hint):
            values = self.load_fields(hint, data, place)
            if (
                missing := _fields(hint).keys()
                - values.keys()
                - (_optional(hint) if self._by_hand else set())
            ):
                raise JsonError(f"it lacks {', '.join(sorted(missing))}", place)
            return hint(**values)
        if _is_mapping(origin) and args[0] is str:
            _check(isinstance(data, dict), "an object", data, place)
            return {key: self._load(args[1], item, f"{place}[{key!r}]") for key, item in data.items()}
        _check(isinstance(data, list), "a list", data, place)
        if _is_mapping(origin):
            return dict(self._load_items([types.GenericAlias(tuple, args)] * len(data), data, place))
        if _is_uniform(origin, args):
            return origin(self._load_items([args[0]] * len(data), data, place))
        items = self._load_items(_members(hint), data, place)
        return tuple(items) if origin is tuple else hint(*items)

    def _load_items(self, hints: Sequence[Any], data: list[Json], place: str) -> list[Any]:
        _check(len(data) == len(hints), f"a list of {len(hints)}", data, place)
        pairs = zip(hints, data, strict=True)
        return [self._load(hint, item, f"{place}[{i}]") for i, (hint, item) in enumerate(pairs)]

    def _load_text(self, hint: Any, data: Json, place: str) -> Any:
        _check(isinstance(data, str), "text", data, place)
        try:
            return self._texts[hint](data)
        except ValueError as error:
            raise JsonError(str(error), place) from None

    def load_fields(self, cls: Any, data: Json, place: str = "") -> dict[str, Any]:
        fields = _fields(cls)
        _check(isinstance(data, dict), "an object", data, place)
        if unknown := data.keys() - fields.keys():
            may = f"it may have {', '.join(fields)}"
            raise JsonError(f"it has {', '.join(sorted(unknown))}; {may}", place)
        return {name: self._load(fields[name], item, f"{place}.{name}") for name, item in data.items()}

    def _load_union(self, members: tuple[Any, ...], data: Json, place: str) -> Any:
        classes = _named_classes(members)
        if classes and isinstance(data, dict):
            (name,) = data if len(data) == 1 else ("",)
            _check(name in classes, f"one of {', '.join(classes)}", data, place)
            return self._load(classes[name], data[name], f"{place}.{name}")
        member = next((member for member in members if _may_be(member, data)), None)
        if member is None:
            raise JsonError(f"{shown(data)} is of a type that does not belong here", place)
        return self._load(member, data, place)


class JsonError(ValueError):
    """A fault in JSON data at a place such as ``.members[0]``."""

    def __init__(self, text: str, place: str):
        super().__init__(cut(f"{place.lstrip('.')}: {text}" if place else text))


@functools.cache
def _fields(cls: Any) -> Mapping[str, Any]:
    """Returns the types of a dataclass's fields, without fields that do not count in comparisons."""
    hints = get_type_hints(cls)
    return {
        field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init and field.compare
    }


def _optional(cls: Any) -> set[str]:
    parameters = inspect.signature(cls).parameters.values()
    return {each.name for each in parameters if each.default is not each.empty}


@functools.cache
def _members(hint: Any) -> Sequence[Any]:
    """Returns the types of the members of a tuple of a fixed length, or of a named tuple."""
    assert issubclass(get_origin(hint) or hint, tuple), f"{hint} has no form in JSON"
    return get_args(hint) or [*get_type_hints(hint).values()]


def _named_classes(members: tuple[Any, ...]) -> Mapping[str, Any]:
    classes = {member.__name__: member for member in members if _is_dataclass(member)}
    return classes if len(classes) > 1 else {}


def _is_dataclass(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)  # whose own result would have mypy take ``hint`` for an instance


def _is_mapping(origin: Any) -> bool:
    return origin is not None and issubclass(origin, Mapping)


def _is_uniform(origin: Any, args: tuple[Any, ...]) -> bool:
    """Tells whether a type is a set, or a tuple of any length whose items have one type."""
    return origin is frozenset or args[-1:] == (...,)


def _is_plain(hint: Any, data: Json) -> bool:
    return type(data) is hint or (hint is float and type(data) is int)


def _is_of(member: Any, value: Any) -> bool:
    """Tells whether a value is of this type of a union, whose types differ in their JSON."""
    origin = get_origin(member) or member
    return type(value) is origin or (origin is not int and isinstance(value, origin))


def _may_be(member: Any, data: Json) -> bool:
    origin = get_origin(member) or member
    if origin in _PLAIN:
        return _is_plain(origin, data)
    return isinstance(data, dict if _is_dataclass(origin) or _is_mapping(origin) else list)


def _check(is_right: bool, expected: str, data: Json, place: str) -> None:
    if not is_right:
        raise JsonError(f"expected {expected}, not {shown(data)}", place)
