"""Equations that concatenate values along one dimension of the result, or slice a value along one
dimension."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.equations import Atom, shape_of


@dataclasses.dataclass(frozen=True)
class Member:
    """A value that is a part of the value ``ConcatOrSlice.whole``.

    Attributes:
      start, size: the first of the elements of the dimension ``ConcatOrSlice.dim`` in it, and their number.
      has_dim: whether it has the dimension; if not, it is a single element along the dimension.
    """

    atom: Atom
    start: int
    size: int
    has_dim: bool = True

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclasses.dataclass(frozen=True)
class ConcatOrSlice:
    """A value that an equation puts together, or takes apart, along one dimension.

    Attributes:
      whole: the value that is put together or taken apart, along its dimension ``dim``.
      members: the operands, or the results.
        Between and around the members ``whole`` has the equation's padding.
      takes_apart: whether ``whole`` is the operand and the members are results.
      reverses: whether the only member has all elements of ``whole`` in reverse.
    """

    whole: Atom
    dim: int
    members: tuple[Member, ...]
    takes_apart: bool
    reverses: bool = False


def concats_and_slices(eqn: JaxprEqn) -> list[ConcatOrSlice]:
    """The dimensions along which an equation takes apart or puts together; several of a slice."""
    rule = _RULES.get(eqn.primitive.name)
    return list(rule(eqn)) if rule else []


def _slice(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    shape, strides = shape_of(eqn.invars[0]), eqn.params["strides"]
    bounds = zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True)
    for d, (start, limit) in enumerate(bounds):
        if limit - start < shape[d] and (strides is None or strides[d] == 1):
            member = Member(eqn.outvars[0], start, limit - start)
            yield ConcatOrSlice(eqn.invars[0], d, (member,), takes_apart=True)


def _pad(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    for d, (low, high, interior) in enumerate(eqn.params["padding_config"]):
        if interior == 0 and min(low, high) >= 0 and max(low, high) > 0:
            member = Member(eqn.invars[0], low, shape_of(eqn.invars[0])[d])
            yield ConcatOrSlice(eqn.outvars[0], d, (member,), takes_apart=False)


def _rev(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    for d in eqn.params["dimensions"]:
        member = Member(eqn.outvars[0], 0, shape_of(eqn.invars[0])[d])
        yield ConcatOrSlice(eqn.invars[0], d, (member,), takes_apart=True, reverses=True)


def _in_a_row(atoms: list[Any], dim: int) -> tuple[Member, ...]:
    sizes = [shape_of(atom)[dim] for atom in atoms]
    starts = itertools.accumulate(sizes[:-1], initial=0)
    return tuple(map(Member, atoms, starts, sizes))


def _concatenate(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    dim = eqn.params["dimension"]
    yield ConcatOrSlice(eqn.outvars[0], dim, _in_a_row(list(eqn.invars), dim), takes_apart=False)


def _split(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    dim = eqn.params["axis"]
    yield ConcatOrSlice(eqn.invars[0], dim, _in_a_row(list(eqn.outvars), dim), takes_apart=True)


def _stack(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    members = (Member(atom, i, 1, has_dim=False) for i, atom in enumerate(eqn.invars))
    yield ConcatOrSlice(eqn.outvars[0], eqn.params["axis"], tuple(members), takes_apart=False)


def _unstack(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    members = (Member(var, i, 1, has_dim=False) for i, var in enumerate(eqn.outvars))
    yield ConcatOrSlice(eqn.invars[0], eqn.params["axis"], tuple(members), takes_apart=True)


_RULES: dict[str, Callable[[JaxprEqn], Iterator[ConcatOrSlice]]] = {
    "concatenate": _concatenate,
    "pad": _pad,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
}
