"""Values of a rewritten step: which are in layer ranges, and how these are put together or cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.cut_layers.layer_dimensions import LayerDimensions
from mpmd.compiler.jaxprs.equations import Atom, aval_of, size
from mpmd.compiler.jaxprs.source import line_of, where
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.ir.stack import Stack
from mpmd.language.annotate import mark_of, mark_text


class Gathered:
    """Notes which equations need values whole that are in layer ranges."""

    def __init__(self) -> None:
        self._notes: dict[str, tuple[Atom, Stack]] = {}

    def note(self, eqn: JaxprEqn | None, atom: Atom, stack: Stack) -> None:
        """Records that ``eqn`` reads all layers of ``atom``, unless ``atom`` has a single number for each
        layer."""
        if size(atom) > sum(stack.sizes):
            self._notes.setdefault(_reader(eqn), (atom, stack))

    def messages(self) -> list[str]:
        return [
            f"{reader} reads all layers of an array of shape {tuple(aval_of(atom).shape)}, stacked "
            f"along axis {stack.axis}: its parts on several groups are sent to one of them and put together. "
            "Compute each layer by itself there, as with jax.vmap over the layers or in their scan"
            for reader, (atom, stack) in self._notes.items()
        ]


def _reader(eqn: JaxprEqn | None) -> str:
    """The name of an equation in messages, or of the step's result."""
    if eqn is None:
        return "the step's result"
    return mark_text(eqn, line_of(eqn)) if mark_of(eqn) else f"{eqn.primitive} at {where(eqn)}"


class Values:
    """The values of one jaxpr that is being rewritten, and its equations so far.

    Attributes:
      origin: for each new variable, also in nested jaxprs, the variable of the original jaxpr of which it is
        a layer range or a partial result.
    """

    def __init__(self, dimensions: LayerDimensions, gathered: Gathered, origin: dict[Var, Var]):
        self.dimensions = dimensions
        self.gathered = gathered
        self.origin = origin
        self.eqns: list[JaxprEqn] = []
        self._ranges: dict[Var, tuple[Atom, ...]] = {}
        self._whole: dict[Var, Atom] = {}
        self._stacks: dict[Var, Stack | None] = {}
        self._pieces: dict[tuple[Var, int, int, int], Atom] = {}

    def within(self) -> Values:
        """For a jaxpr inside of this one."""
        return Values(self.dimensions, self.gathered, self.origin)

    def planned(self, atom: Atom) -> Stack | None:
        """The stack that a value is planned to be in; ``None`` for a whole value."""
        if not isinstance(atom, Var):
            return None
        if atom not in self._stacks:
            self._stacks[atom] = self.dimensions.stack(atom)
        return self._stacks[atom]

    def stack(self, atom: Atom) -> Stack | None:
        """The stack that a value was computed in; ``None`` for a whole value."""
        return self.planned(atom) if isinstance(atom, Var) and atom in self._ranges else None

    def bind(self, var: Var) -> tuple[Var, ...]:
        """New variables for one that comes from outside, one for each layer range; or itself."""
        if self.planned(var) is None:
            return (var,)
        return self.define_ranges(var)

    def define_ranges(self, var: Var) -> tuple[Var, ...]:
        """New variables for the layer ranges of one that is to be in layer ranges."""
        new = self.range_vars(var, self._planned(var))
        self._ranges[var] = new
        return new

    def range_vars(self, var: Var, stack: Stack) -> tuple[Var, ...]:
        """A new variable for each layer range of one."""
        return tuple(self.var_like(var, shape) for shape in stack.shapes(aval_of(var).shape))

    def var_like(self, var: Var, shape: Sequence[int] | None = None) -> Var:
        """A new variable of the type of another one, perhaps of another shape."""
        aval: Any = var.aval
        new = Var(aval if shape is None else aval.update(shape=tuple(shape)))
        self.origin[new] = var
        return new

    def set_ranges(self, var: Var, ranges: Sequence[Atom]) -> None:
        """Defines a value by its layer ranges."""
        assert len(ranges) == len(self._planned(var).sizes), f"{var} has {len(ranges)} parts"
        self._ranges[var] = tuple(ranges)

    def set_whole(self, var: Var, atom: Atom) -> None:
        """This is a value. It is cut later if it is to be in layer ranges."""
        self._whole[var] = atom

    def whole(self, atom: Atom, like: JaxprEqn | None = None) -> Atom:
        """The value, of its parts put together if need be.

        Args:
          like: the equation that reads it.
        """
        if not isinstance(atom, Var):
            return atom
        if atom in self._ranges and atom not in self._whole:
            stack = self._planned(atom)
            self.gathered.note(like, atom, stack)
            self._whole[atom] = self.joined(self._ranges[atom], stack.axis, like)
        return self._whole.get(atom, atom)

    def ranges(self, atom: Atom, stack: Stack, like: JaxprEqn | None = None) -> tuple[Atom, ...]:
        """The value in these layer ranges."""
        if self.stack(atom) == stack:
            assert isinstance(atom, Var)
            return self._ranges[atom]
        return tuple(self.piece(atom, stack.axis, s.start, s.stop, like) for s in stack.slices)

    def as_planned(self, atom: Atom, stack: Stack | None, like: JaxprEqn | None = None) -> tuple[Atom, ...]:
        """The value in these layer ranges, or whole."""
        return (self.whole(atom, like),) if stack is None else self.ranges(atom, stack, like)

    def piece(self, atom: Atom, dim: int, start: int, stop: int, like: JaxprEqn | None = None) -> Atom:
        """The elements of a value from ``start`` to ``stop`` along a dimension."""
        if isinstance(atom, Var) and (atom, dim, start, stop) in self._pieces:
            return self._pieces[atom, dim, start, stop]
        stack = self.stack(atom)
        if stack is None or stack.axis != dim:
            piece = self._sliced(self.whole(atom, like), dim, start, stop, like)
        else:
            assert isinstance(atom, Var)
            overlapping = [
                self._sliced(part, dim, max(start - s.start, 0), min(stop, s.stop) - s.start, like)
                for part, s in zip(self._ranges[atom], stack.slices, strict=True)
                if s.start < stop and start < s.stop
            ]
            if len(overlapping) > 1:
                self.gathered.note(like, atom, stack)
            piece = self.joined(overlapping, dim, like)
        if isinstance(atom, Var):
            self._pieces[atom, dim, start, stop] = piece
        return piece

    def emit(self, eqn: JaxprEqn, invars: Sequence[Atom], outvars: Sequence[Var], **params: Any) -> None:
        """Adds an equation like another one."""
        new = {**eqn.params, **params}
        self.eqns.append(eqn.replace(invars=list(invars), outvars=list(outvars), params=new))

    def trace(self, fun: Callable, inputs: Sequence[Atom], like: JaxprEqn | None) -> list[Atom]:
        """Adds the equations of ``fun(*inputs)``, as of the line and transformations of another one."""
        eqns, results = traced_eqns(fun, inputs)
        info = like.source_info if like else None
        self.eqns += [eqn.replace(source_info=info) if info else eqn for eqn in eqns]
        return results

    def joined(self, atoms: Sequence[Atom], dim: int, like: JaxprEqn | None) -> Atom:
        """Values one behind the other."""
        if len(atoms) == 1:
            return atoms[0]
        return self.trace(lambda *ranges: [lax.concatenate(ranges, dim)], atoms, like)[0]

    def _sliced(self, atom: Atom, dim: int, start: int, stop: int, like: JaxprEqn | None) -> Atom:
        if stop - start == aval_of(atom).shape[dim]:
            return atom
        return self.trace(lambda x: [lax.slice_in_dim(x, start, stop, axis=dim)], [atom], like)[0]

    def _planned(self, var: Var) -> Stack:
        stack = self.planned(var)
        assert stack is not None, f"{var} is whole"
        return stack


def zeros_like(values: Values, atom: Atom, like: JaxprEqn) -> Atom:
    """Zeros of a value's shape and dtype."""
    return values.trace(lambda x: [jnp.zeros_like(x)], [atom], like)[0]
