"""Faults of arguments, each an error with the parameter, its valid values and the value. No JAX.

A public function looks at its arguments before it starts anything, and raises all that is wrong at once::

    raise_faults(
        int_fault("steps", steps),
        number_fault("timeout", timeout, "a number of seconds", above=0),
    )

A value of a wrong type is a ``TypeError``, one of the right type that is out of range a ``ValueError``.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, get_type_hints

Class = TypeVar("Class")

Fault = TypeError | ValueError
Rule = Callable[[str, Any], "Fault | Iterable[Fault | None] | None"]
"""The faults of a field's value, by the name of the field and the value."""

_SHOWN = 200
"""The most characters of a value in a message: it may be an array, or a whole state."""


def raise_faults(*faults: Fault | None, title: str = "") -> None:
    """Raises all faults as one error: ``TypeError`` if one fault is a ``TypeError``, else ``ValueError``.

    Args:
      faults: errors; ``None`` for valid arguments.
      title: stands before them.
    """
    if errors := [fault for fault in faults if fault is not None]:
        kind = TypeError if any(isinstance(error, TypeError) for error in errors) else ValueError
        raise kind(cut(title + "\n".join(map(str, errors))))


def faults_of(cls: type, values: Mapping[str, Any]) -> Iterator[Fault | None]:
    """The faults of values by the rules of a class's fields.

    A rule is in the annotation of its field: ``nodes: Annotated[int, int_fault]``. Of several rules for a
    field the first one that finds a fault counts.

    Args:
      values: by the names of fields.
    """
    rules = _rules_of(cls)
    for name, value in values.items():
        for rule in rules[name]:
            found = rule(name, value)
            faults = [found] if found is None or isinstance(found, Fault) else [*found]
            yield from faults
            if any(faults):
                break


@functools.cache
def _rules_of(cls: type) -> Mapping[str, tuple[Rule, ...]]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


def finite_fault(name: str, value: float) -> ValueError | None:
    return ValueError(f"{name} must be finite, not {value}") if math.isinf(value) else None


def shown(value: Any) -> str:
    return cut(repr(value), _SHOWN)


def cut(text: str, most: int = 1_900) -> str:
    """A text without the characters after the first ``most``: a message may quote a file of any size."""
    return text if len(text) <= most else f"{text[:most]}..."


def is_int(value: Any) -> bool:
    """Whether a value is an integer, of Python or numpy; a ``bool`` is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def int_fault(
    name: str, value: Any, least: float = 1, *, most: float = math.inf, optional: bool = False
) -> Fault | None:
    if optional and value is None:
        return None
    bounds = (
        ""
        if math.isinf(least)
        else f" of at least {least}"
        if math.isinf(most)
        else f" from {least} to {most}"
    )
    text = f"{name} must be a whole number{bounds}{_or_none(optional)}, not {shown(value)}"
    if not is_int(value):
        return TypeError(text)
    return None if least <= value <= most else ValueError(text)


def number_fault(
    name: str,
    value: Any,
    what: str = "a number",
    *,
    least: float | None = None,
    above: float | None = None,
    finite: bool = False,
    optional: bool = False,
) -> Fault | None:
    """The fault of a number, which is not NaN.

    Args:
      what: the number, with its unit, such as ``a number of seconds``.
      least, above: a bound that belongs to the range, or does not.
      finite: whether infinity is refused.
      optional: whether ``None`` is valid.
    """
    if optional and value is None:
        return None
    bound = f" of at least {least}" if least is not None else "" if above is None else f" above {above}"
    kind = "a finite" + what[1:] if finite else what
    text = f"{name} must be {kind}{bound}{_or_none(optional)}, not {shown(value)}"
    if not is_number(value):
        return TypeError(text)
    try:
        as_float = float(value)
    except OverflowError:  # an int of more than 308 digits
        return ValueError(f"{name} must be at most {sys.float_info.max:.1e}")
    in_range = (least is None or value >= least) and (above is None or value > above)
    is_valid = in_range and not math.isnan(as_float) and (math.isfinite(as_float) or not finite)
    return None if is_valid else ValueError(text)


def type_fault(name: str, value: Any, types: Any, what: str, *, optional: bool = False) -> TypeError | None:
    """The fault of a value that has to be of some types, as ``isinstance`` takes them.

    Args:
      what: the types in words, such as ``a str``.
    """
    if isinstance(value, types) or (optional and value is None):
        return None
    return TypeError(f"{name} must be {what}{_or_none(optional)}, not {shown(value)}")


def str_fault(name: str, value: Any, *, optional: bool = False) -> TypeError | None:
    return type_fault(name, value, str, "a str", optional=optional)


def bool_fault(name: str, value: Any, *, optional: bool = False) -> TypeError | None:
    return type_fault(name, value, bool, "True or False", optional=optional)


def path_fault(name: str, value: Any, *, optional: bool = False) -> TypeError | None:
    return type_fault(name, value, str | os.PathLike, "a path, a str or os.PathLike", optional=optional)


def callable_fault(name: str, value: Any) -> TypeError | None:
    return None if callable(value) else TypeError(f"{name} must be a function, not {shown(value)}")


def choice_fault(name: str, value: Any, choices: Collection[str]) -> Fault | None:
    if isinstance(value, str) and value in choices:
        return None
    kind = ValueError if isinstance(value, str) else TypeError
    return kind(f"{name} must be one of {', '.join(map(repr, choices))}, not {shown(value)}")


def sequence_fault(name: str, value: Any, what: str) -> TypeError | None:
    return None if is_sequence(value) else TypeError(f"{name} must be {what}, not {shown(value)}")


def int_faults(name: str, values: Iterable[Any], least: float = 1) -> Iterator[Fault | None]:
    return (int_fault(f"{name}[{i}]", value, least) for i, value in enumerate(values))


def positions_faults(name: str, value: Any) -> Iterator[Fault | None]:
    if is_int(value):
        return
    yield type_fault(name, value, Iterable, "the position of an argument, or a sequence of positions")
    if isinstance(value, str | Mapping):
        yield TypeError(
            f"{name} must be the position of an argument, or a sequence of positions, not {shown(value)}"
        )
    elif isinstance(value, Collection):
        yield from int_faults(name, value, -math.inf)


def names_faults(name: str, value: Any) -> Iterator[Fault | None]:
    if isinstance(value, str):
        return
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        if isinstance(value, Collection):
            yield from (str_fault(f"{name}[{i}]", each) for i, each in enumerate(value))
    else:
        what = "the name of an argument, or a sequence of names"
        yield TypeError(f"{name} must be {what}, not {shown(value)}")


def _or_none(optional: bool) -> str:
    return ", or None" if optional else ""


MOST_DEVICES = 2**20
"""The most devices of all groups of a mesh; more than any cluster has."""


def device_count_fault(num_devices: int) -> ValueError | None:
    """The fault of a number of devices that no mesh can have, before anything of that size is made."""
    if num_devices <= MOST_DEVICES:
        return None
    return ValueError(
        f"{counted(num_devices)} devices are more than a mesh can have, which are {MOST_DEVICES}"
    )


def size_fault(name: str, value: Any, most: int = MOST_DEVICES) -> Fault | None:
    """The fault of a number of stages, microbatches or slices, before a list of as many is made."""
    if is_int(value) and value > most:
        return ValueError(f"{name} is {counted(value)}, and must be at most {most}")
    return int_fault(name, value)


def counted(number: int) -> str:
    return str(number) if number < 10**18 else "more than 10**18"


def refusing(**errors: str) -> Callable[[type[Class]], type[Class]]:
    """Decorates a dataclass: fields that it once had raise ``TypeError`` with the text of ``errors``."""

    def decorated(cls: type[Class]) -> type[Class]:
        init: Callable[..., None] = cls.__init__

        @functools.wraps(init)
        def __init__(self: Class, *args: Any, **values: Any) -> None:
            for name in errors.keys() & values.keys():
                raise TypeError(errors[name])
            init(self, *args, **values)

        cls.__init__ = __init__  # type: ignore[method-assign, assignment]
        return cls

    return decorated
