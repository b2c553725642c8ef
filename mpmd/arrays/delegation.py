"""The methods of ``jax.Array`` for a class of arrays that delegates them to its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

_OF_CLASSES = frozenset("__doc__ __hash__ __module__ __numpy_dtype__ __slots__ __weakref__".split())

_BESIDES = "__complex__ __dlpack__ __dlpack_device__ __iter__ devices is_ready tobytes tolist".split()
"""The methods of arrays that their base class does not name."""

_PROPERTIES = frozenset(
    "T addressable_shards at device flat global_shards imag is_fully_addressable is_fully_replicated mT "
    "real".split()
)

Class = TypeVar("Class", bound=type)


def delegate_to_value(array_class: Class) -> Class:
    """Gives a subclass of ``jax.Array`` the methods, operators and properties that it does not define.

    They are those of ``self.value``, a jax array, and so are their results.
    """
    defined = vars(array_class)
    for name in [*vars(jax.Array), *_BESIDES]:
        if name not in defined and name not in _OF_CLASSES:
            setattr(array_class, name, _property(name) if name in _PROPERTIES else _method(name))
    return array_class


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.value, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _property(name: str) -> property:
    return property(lambda self: getattr(self.value, name))
