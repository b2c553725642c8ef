"""The methods of ``jax.Array`` for a class of arrays that delegates them to its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from mpmd.compat import api_boundary

_OF_CLASSES = frozenset("__doc__ __hash__ __module__ __numpy_dtype__ __slots__ __weakref__".split())

_OF_NUMPY = "__bool__ __complex__ __float__ __index__ __int__ item tobytes tolist".split()
"""The methods with results of Python, which need no array on a device."""

_BESIDES = "__dlpack__ __dlpack_device__ __iter__ devices is_ready".split()
"""Methods of arrays that their base class does not name."""

_PROPERTIES = frozenset(
    "T addressable_shards at device flat global_shards imag is_fully_addressable is_fully_replicated mT "
    "real".split()
)

Class = TypeVar("Class", bound=type)


def delegate_to_value(array_class: Class) -> Class:
    """Gives a subclass of ``jax.Array`` the methods, operators and properties that it does not define.

    Each calls the attribute of ``self.value``, a jax array, or of its numpy array, and returns its result.
    """
    defined = vars(array_class)
    for name in [*vars(jax.Array), *_BESIDES, *_OF_NUMPY]:
        if name not in defined and name not in _OF_CLASSES:
            setattr(array_class, name, _property(name) if name in _PROPERTIES else _method(name))
    return array_class


def _method(name: str) -> Callable[..., Any]:
    @api_boundary
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = np.asarray(self) if name in _OF_NUMPY else self.value
        return getattr(value, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _property(name: str) -> property:
    return property(api_boundary(lambda self: getattr(self.value, name)))
