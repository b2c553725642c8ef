"""Frozen data as JSON and back, by the types of its fields. Nothing of what is read is executed.

Dataclasses are objects with their fields; named tuples, tuples and sets are lists; mappings are lists of
pairs, or objects if their keys are text; types that print as text which parses back are that text. Where a
field may be one of several dataclasses, the name of its class is the object's one key.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from mpmd.validation import cut

Json = Any
"""Data as ``json`` reads and writes it."""


class Text(NamedTuple):
    """The text form of a type: ``parse`` undoes ``str``, and raises ``ValueError`` for other texts."""

    parse: Callable[[str], Any]


class JsonFormat:
    """Writes and reads data of certain types.

    Args:
      texts: the types, or unions of types, that are written as text.
    """

    def __init__(self, texts: Mapping[Any, Text]):
        self._texts = texts

    def dump(self, hint: Any, value: Any) -> Json:
        """The value as JSON. Its type has to be ``hint``."""
        return self._converters(hint)[0](value)

    def load(self, hint: Any, data: Json) -> Any:
        """The value of type ``hint``. Raises ``ValueError`` that names the place of the first fault."""
        try:
            return self._converters(hint)[1](data)
        except _FaultError as fault:
            raise ValueError(cut(str(fault))) from None

    @functools.cache  # noqa: B019 - formats are module constants
    def _converters(self, hint: Any) -> tuple[Callable[[Any], Json], Callable[[Json], Any]]:
        """Functions that write and read a type; resolved when first called, since types may refer to one."""
        if hint in self._texts:
            return str, functools.partial(_load_text, self._texts[hint].parse)
        origin, args = get_origin(hint), get_args(hint)
        if hint in (int, float, str, bool, type(None)):
            return _same, functools.partial(_load_plain, hint)
        if origin in (Union, types.UnionType):
            return functools.partial(self._dump_union, args), functools.partial(self._load_union, args)
        if origin in (tuple, frozenset):
            if origin is tuple and args[-1:] != (...,):
                return functools.partial(self._dump_items, args), functools.partial(self._load_items, args)
            dump = functools.partial(self._dump_many, args[0])
            return dump, functools.partial(self._load_many, origin, args[0])
        if origin is not None and issubclass(origin, Mapping):
            return functools.partial(self._dump_mapping, args), functools.partial(self._load_mapping, args)
        hints = get_type_hints(hint)
        assert isinstance(hint, type), f"{hint} has no form in JSON"
        if dataclasses.is_dataclass(hint):
            # A field that does not count in comparisons is not part of the data.
            fields = {f.name: hints[f.name] for f in dataclasses.fields(hint) if f.init and f.compare}
            dump = functools.partial(self._dump_fields, fields)
            return dump, functools.partial(self._load_fields, hint, fields)
        assert issubclass(hint, tuple), f"{hint} has no form in JSON"
        members = tuple(hints.values())
        dump = functools.partial(self._dump_items, members)
        return dump, lambda data: hint(*self._load_items(members, data))

    def _dump_fields(self, fields: Mapping[str, Any], value: Any) -> Json:
        return {name: self.dump(hint, getattr(value, name)) for name, hint in fields.items()}

    def _load_fields(self, cls: type, fields: Mapping[str, Any], data: Json) -> Any:
        _check(isinstance(data, dict), "an object", data)
        if missing := fields.keys() - data.keys():
            raise _FaultError(f"it lacks {', '.join(sorted(missing))}")
        if unknown := data.keys() - fields.keys():
            raise _FaultError(f"it has {', '.join(sorted(unknown))}, which no {cls.__name__} has")
        return cls(**{name: self._at(f".{name}", hint, data[name]) for name, hint in fields.items()})

    def _dump_items(self, hints: tuple[Any, ...], value: Any) -> Json:
        return [self.dump(hint, item) for hint, item in zip(hints, value, strict=True)]

    def _load_items(self, hints: tuple[Any, ...], data: Json) -> tuple[Any, ...]:
        _check(isinstance(data, list) and len(data) == len(hints), f"a list of {len(hints)}", data)
        items = zip(hints, data, strict=True)
        return tuple(self._at(f"[{i}]", hint, item) for i, (hint, item) in enumerate(items))

    def _dump_many(self, hint: Any, value: Any) -> Json:
        dump = self._converters(hint)[0]
        return [dump(item) for item in (sorted(value) if isinstance(value, frozenset) else value)]

    def _load_many(self, collection: type, hint: Any, data: Json) -> Any:
        _check(isinstance(data, list), "a list", data)
        return collection(self._at(f"[{i}]", hint, item) for i, item in enumerate(data))

    def _dump_mapping(self, args: tuple[Any, Any], value: Mapping) -> Json:
        key, item = args
        if key is str:
            return {name: self.dump(item, value[name]) for name in value}
        return [[self.dump(key, k), self.dump(item, v)] for k, v in value.items()]

    def _load_mapping(self, args: tuple[Any, Any], data: Json) -> Mapping:
        if args[0] is str:
            _check(isinstance(data, dict), "an object", data)
            return {name: self._at(f"[{name!r}]", args[1], item) for name, item in data.items()}
        _check(isinstance(data, list), "a list of pairs", data)
        pairs = (self._load_pair(f"[{i}]", args, pair) for i, pair in enumerate(data))
        return dict(pairs)

    def _load_pair(self, place: str, hints: tuple[Any, Any], data: Json) -> tuple[Any, Any]:
        try:
            key, value = self._load_items(hints, data)
        except _FaultError as fault:
            raise fault.within(place) from None
        return key, value

    def _dump_union(self, args: tuple[Any, ...], value: Any) -> Json:
        classes = _dataclasses(args)
        if len(classes) > 1 and type(value) in classes:
            return {type(value).__name__: self.dump(type(value), value)}
        return self.dump(next(hint for hint in args if _is_of(hint, value)), value)

    def _load_union(self, args: tuple[Any, ...], data: Json) -> Any:
        classes = {
            cls.__name__: cls for cls in args if isinstance(cls, type) and dataclasses.is_dataclass(cls)
        }
        if len(classes) > 1 and isinstance(data, dict):
            (name,) = data if len(data) == 1 else ("",)
            if name not in classes:
                raise _FaultError(f"expected one of {', '.join(classes)}, not {_shown(data)}")
            return self._at(f".{name}", classes[name], data[name])
        hint = next((hint for hint in args if _is_json_of(hint, data)), None)
        if hint is None:
            raise _FaultError(f"{_shown(data)} is of a type that does not belong here")
        return self._converters(hint)[1](data)

    def _at(self, place: str, hint: Any, data: Json) -> Any:
        try:
            return self._converters(hint)[1](data)
        except _FaultError as fault:
            raise fault.within(place) from None


class _FaultError(Exception):
    """A fault in JSON data, and its place."""

    def __init__(self, text: str, place: str = ""):
        super().__init__(text, place)
        self.text, self.place = text, place

    def within(self, place: str) -> _FaultError:
        return _FaultError(self.text, place + self.place)

    def __str__(self) -> str:
        return f"{self.place.lstrip('.')}: {self.text}" if self.place else self.text


def _dataclasses(hints: tuple[Any, ...]) -> list[type]:
    return [hint for hint in hints if isinstance(hint, type) and dataclasses.is_dataclass(hint)]


def _same(value: Any) -> Json:
    return value


def _load_plain(cls: type, data: Json) -> Any:
    right = type(data) is cls or (cls is float and type(data) is int)
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    _check(right and (cls is not float or math.isfinite(data)), names[cls], data)
    return float(data) if cls is float else data


def _load_text(parse: Callable[[str], Any], data: Json) -> Any:
    _check(isinstance(data, str), "text", data)
    try:
        return parse(data)
    except ValueError as error:
        raise _FaultError(str(error)) from None


def _check(is_right: bool, expected: str, data: Json) -> None:
    if not is_right:
        raise _FaultError(f"expected {expected}, not {_shown(data)}")


def _shown(data: Json) -> str:
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_of(hint: Any, value: Any) -> bool:
    """Whether a value is of one of the types of a union, which differ in their JSON."""
    origin = get_origin(hint) or hint
    return type(value) is origin or (origin is not int and isinstance(value, origin))


def _is_json_of(hint: Any, data: Json) -> bool:
    """Whether JSON data is of one of the types of a union, as far as its outermost type says."""
    origin = get_origin(hint) or hint
    if origin in (int, float, str, bool, type(None)):
        return type(data) is origin or (origin is float and type(data) is int)
    if dataclasses.is_dataclass(origin) or (issubclass(origin, Mapping)):
        return isinstance(data, dict)
    return isinstance(data, list)
