"""Values of a rewritten step: which are in layer ranges, and how these are put together or cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Var

from mpmd.compiler.cut_layers.dimension_graph import DimensionGraph
from mpmd.compiler.jaxprs.equations import Atom, is_among, shape_of, size
from mpmd.compiler.jaxprs.source import line_of, where
from mpmd.compiler.jaxprs.traced import traced_eqns
from mpmd.ir.stack import Stack
from mpmd.language.annotate import mark_of, mark_text


def _reader_text(eqn: JaxprEqn | None) -> str:
    if eqn is None:
        return "the step's result"
    return mark_text(eqn, line_of(eqn)) if mark_of(eqn) else f"{eqn.primitive} at {where(eqn)}"


class Values:
    """The values of one jaxpr that is being rewritten, and its equations so far.

    Attributes:
      graph: the dimensions of the step.
      gathered: by the names of equations, warnings of values in layer ranges that the equations read whole.
      origin: for each new variable, also in nested jaxprs, the variable of the original jaxpr of which it is
        a layer range or a partial result.
    """

    def __init__(self, graph: DimensionGraph, gathered: dict[str, str], origin: dict[Var, Var]):
        self.graph = graph
        self.gathered = gathered
        self.origin = origin
        self.eqns: list[JaxprEqn] = []
        self._ranges: dict[Var, tuple[Atom, ...]] = {}
        self._whole: dict[Var, Atom] = {}
        self._stacks: dict[Var, Stack | None] = {}
        self._pieces: dict[tuple[Var, int, int, int], Atom] = {}

    def within(self) -> Values:
        return Values(self.graph, self.gathered, self.origin)

    def planned(self, atom: Atom) -> Stack | None:
        """The stack that a value is planned to be in; ``None`` for a whole value."""
        if not isinstance(atom, Var):
            return None
        if atom not in self._stacks:
            self._stacks[atom] = self.graph.dimensions.stack(atom)
        return self._stacks[atom]

    def stack(self, atom: Atom) -> Stack | None:
        """The stack that a value was computed in; ``None`` for a whole value."""
        return self.planned(atom) if is_among(atom, self._ranges) else None

    def bind(self, var: Var) -> tuple[Var, ...]:
        """New variables for the layer ranges of ``var``; ``var`` itself if it is to be whole."""
        stack = self.planned(var)
        if stack is None:
            return (var,)
        self._ranges[var] = new = self.range_vars(var, stack)
        return new

    def range_vars(self, var: Var, stack: Stack) -> tuple[Var, ...]:
        return tuple(self.var_like(var, shape) for shape in stack.shapes(shape_of(var)))

    def var_like(self, var: Var, shape: Sequence[int] | None = None) -> Var:
        aval: Any = var.aval
        new = Var(aval if shape is None else aval.update(shape=tuple(shape)))
        self.origin[new] = var
        return new

    def define(self, var: Var, pieces: Sequence[Atom]) -> None:
        """Defines a value by its layer ranges, or by a single whole value, which is cut where need be."""
        if len(pieces) > 1:
            self._ranges[var] = tuple(pieces)
        else:
            (self._whole[var],) = pieces

    def whole(self, atom: Atom, like: JaxprEqn | None = None) -> Atom:
        """The value, of its layer ranges put together if need be.

        Args:
          like: the equation that reads it.
        """
        if not isinstance(atom, Var):
            return atom
        stack = self.stack(atom)
        if stack is not None and atom not in self._whole:
            self._whole[atom] = self.piece(atom, stack.axis, 0, sum(stack.sizes), like)
        return self._whole.get(atom, atom)

    def ranges(self, atom: Atom, stack: Stack, like: JaxprEqn | None = None) -> tuple[Atom, ...]:
        if self.stack(atom) == stack:
            assert isinstance(atom, Var)
            return self._ranges[atom]
        return tuple(self.piece(atom, stack.axis, s.start, s.stop, like) for s in stack.slices)

    def as_planned(self, atom: Atom, stack: Stack | None, like: JaxprEqn | None = None) -> tuple[Atom, ...]:
        return (self.whole(atom, like),) if stack is None else self.ranges(atom, stack, like)

    def piece(self, atom: Atom, dim: int, start: int, stop: int, like: JaxprEqn | None) -> Atom:
        if isinstance(atom, Var) and (atom, dim, start, stop) in self._pieces:
            return self._pieces[atom, dim, start, stop]
        stack = self.stack(atom)
        if stack is not None and stack.axis == dim:
            assert isinstance(atom, Var)
            parts = list(zip(self._ranges[atom], stack.slices, strict=True))
        else:
            parts = [(self.whole(atom, like), slice(0, shape_of(atom)[dim]))]
        overlapping = [
            self._sliced(part, dim, max(start - s.start, 0), min(stop, s.stop) - s.start, like)
            for part, s in parts
            if s.start < stop and start < s.stop
        ]
        if len(overlapping) > 1 and stack is not None:
            self._note(like, atom, stack)
        piece = self.joined(overlapping, dim, like)
        if isinstance(atom, Var):
            self._pieces[atom, dim, start, stop] = piece
        return piece

    def _note(self, eqn: JaxprEqn | None, atom: Atom, stack: Stack) -> None:
        if size(atom) > sum(stack.sizes):
            reader = _reader_text(eqn)
            message = (
                f"{reader} reads all layers of an array of shape {shape_of(atom)}, stacked along axis "
                f"{stack.axis}: its parts on several groups are sent to one of them and put together. "
                "Compute each layer by itself there, as with jax.vmap over the layers or in their scan"
            )
            self.gathered.setdefault(reader, message)

    def emit(self, eqn: JaxprEqn, invars: Sequence[Atom], outvars: Sequence[Var], **params: Any) -> None:
        new = {**eqn.params, **params}
        self.eqns.append(eqn.replace(invars=list(invars), outvars=list(outvars), params=new))

    def trace(self, fun: Callable, inputs: Sequence[Atom], like: JaxprEqn | None) -> list[Atom]:
        """Adds the equations of ``fun(*inputs)``, as of the line and transformations of another one."""
        eqns, results = traced_eqns(fun, inputs)
        info = like.source_info if like else None
        self.eqns += [eqn.replace(source_info=info) if info else eqn for eqn in eqns]
        return results

    def joined(self, atoms: Sequence[Atom], dim: int, like: JaxprEqn | None) -> Atom:
        if len(atoms) == 1:
            return atoms[0]
        return self.trace(lambda *ranges: [lax.concatenate(ranges, dim)], atoms, like)[0]

    def _sliced(self, atom: Atom, dim: int, start: int, stop: int, like: JaxprEqn | None) -> Atom:
        if stop - start == shape_of(atom)[dim]:
            return atom
        return self.trace(lambda x: [lax.slice_in_dim(x, start, stop, axis=dim)], [atom], like)[0]
