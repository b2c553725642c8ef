"""A public function with what its parameters take, and the values that each of them does not take."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

VALUES: Mapping[str, Any] = {
    "object": object(),
    "number": 3,
    "negative": -1,
    "float": 3.5,
    "nan": float("nan"),
    "text": "x",
    "none": None,
    "list": [1],
    "objects": [object()],
    "flag": True,
    "dict": {"a": "b"},
    "sizes": {"a": 1},
}
"""What is passed for each parameter that does not take it."""

KINDS: Mapping[str, set[str]] = {
    "special": set(),
    "anything": set(VALUES),
    "count": {"number"},
    "int": {"number", "negative"},
    "amount": {"number", "float"},
    "text": {"text"},
    "flag": {"flag"},
    "positions": {"number", "negative", "list"},
    "argument": {"number", "negative", "text"},
    "counts": {"list"},
    "numbers": {"number", "negative", "float", "nan", "list", "flag", "sizes"},
    "number or array": {"number", "negative", "float", "nan", "flag"},
    "count or counts": {"number", "list"},
    "time or times": {"number", "float", "list"},
    "mapping": {"dict", "sizes"},
    "sizes": {"sizes"},
}
"""For each kind of parameter the values that it takes; with ``?`` at its end, also ``None``."""


@dataclasses.dataclass(frozen=True)
class Public:
    """A public function.

    Attributes:
      takes: for each parameter its kind, and a valid argument; without that, the parameter is left out.
    """

    name: str
    function: Callable
    takes: Mapping[str, tuple]

    def refused(self) -> list[tuple[str, str]]:
        """Its parameters, each with the name of a value that it does not take."""
        return [
            (parameter, value)
            for parameter, (kind, *_) in self.takes.items()
            for value in VALUES
            if value not in KINDS[kind.removesuffix("?")] and (value != "none" or not kind.endswith("?"))
        ]

    def call(self, **changed: Any) -> Any:
        """Calls it with valid arguments but for some."""
        valid = {name: argument[0] for name, (_, *argument) in self.takes.items() if argument}
        return self.function(**{**valid, **changed})

    @property
    def parameters(self) -> set[str]:
        """The names in its signature, without those of ``*args`` and ``**kwargs``."""
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        signature = inspect.signature(self.function).parameters
        return {name for name, parameter in signature.items() if parameter.kind not in several}
