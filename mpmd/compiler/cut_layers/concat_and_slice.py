"""Equations that concatenate values along one dimension of the result, or slice a value along one
dimension."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from mpmd.compiler.jaxprs.equations import Atom, shape_of


class Member(NamedTuple):
    """The elements of ``ConcatOrSlice.whole`` from ``start`` to ``stop`` along the dimension ``dim``."""

    atom: Atom
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class ConcatOrSlice:
    """A value that an equation puts together, or takes apart, along one dimension.

    Attributes:
      whole: the value that is put together or taken apart, along its dimension ``dim``.
      members: the operands, or the results. Between and around the members ``whole`` has the equation's
        padding. The only member of a ``rev`` has all elements of ``whole`` in reverse.
      takes_apart: whether ``whole`` is the operand and the members are results.
      have_dim: whether members have the dimension; if not, each is a single element along the dimension.
    """

    whole: Atom
    dim: int
    members: tuple[Member, ...]
    takes_apart: bool
    have_dim: bool = True


def concats_and_slices(eqn: JaxprEqn) -> list[ConcatOrSlice]:
    rule = _RULES.get(eqn.primitive.name)
    return list(rule(eqn)) if rule else []


def _slice(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    shape, strides = shape_of(eqn.invars[0]), eqn.params["strides"]
    bounds = zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True)
    for d, (start, limit) in enumerate(bounds):
        if limit - start < shape[d] and (strides is None or strides[d] == 1):
            yield ConcatOrSlice(eqn.invars[0], d, (Member(eqn.outvars[0], start, limit),), takes_apart=True)


def _pad(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    for d, (low, high, interior) in enumerate(eqn.params["padding_config"]):
        if interior == 0 and min(low, high) >= 0 and max(low, high) > 0:
            member = Member(eqn.invars[0], low, low + shape_of(eqn.invars[0])[d])
            yield ConcatOrSlice(eqn.outvars[0], d, (member,), takes_apart=False)


def _rev(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    for d in eqn.params["dimensions"]:
        yield ConcatOrSlice(eqn.invars[0], d, _in_a_row(eqn.outvars, d), takes_apart=True)


def _in_a_row(atoms: Sequence[Atom], dim: int) -> tuple[Member, ...]:
    ends = list(itertools.accumulate((shape_of(atom)[dim] for atom in atoms), initial=0))
    return tuple(map(Member, atoms, ends, ends[1:]))


def _concatenate(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    dim = eqn.params["dimension"]
    yield ConcatOrSlice(eqn.outvars[0], dim, _in_a_row(eqn.invars, dim), takes_apart=False)


def _split(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    dim = eqn.params["axis"]
    yield ConcatOrSlice(eqn.invars[0], dim, _in_a_row(eqn.outvars, dim), takes_apart=True)


def _stack(eqn: JaxprEqn) -> Iterator[ConcatOrSlice]:
    takes_apart = eqn.primitive.name == "unstack"
    (whole,), atoms = (eqn.invars, eqn.outvars) if takes_apart else (eqn.outvars, eqn.invars)
    members = tuple(Member(atom, i, i + 1) for i, atom in enumerate(atoms))
    yield ConcatOrSlice(whole, eqn.params["axis"], members, takes_apart, have_dim=False)


_RULES: dict[str, Callable[[JaxprEqn], Iterator[ConcatOrSlice]]] = {
    "concatenate": _concatenate,
    "pad": _pad,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "unstack": _stack,
}
