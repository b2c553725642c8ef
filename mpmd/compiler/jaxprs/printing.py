"""Prints equations with names that are the same in every run: a line for each equation.

The line has the result's type and the operands, not the parameters, because those differ between releases of
JAX. ``jaxpr_as_fun`` and JAX's own printer show them.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from mpmd.compiler.jaxprs.equations import Atom, aval_of, is_dropped


class Names:
    """Names variables in the order in which they are first asked for: a, b, ..., z, ba, bb, ...

    Args:
      names: the names of variables that have one already, such as arguments.
    """

    def __init__(self, names: Mapping[Var, str]):
        self._names = dict(names)
        self._count = 0

    def of(self, atom: Atom) -> str:
        if isinstance(atom, Literal):
            return str(atom.val)
        if atom not in self._names:
            self._names[atom] = "_" if is_dropped(atom) else self._next()
        return self._names[atom]

    def all(self, atoms: Iterable[Atom]) -> str:
        return ", ".join(map(self.of, atoms))

    def typed(self, atom: Atom) -> str:
        return f"{self.of(atom)}:{type_text(aval_of(atom))}"

    def equation(self, eqn: JaxprEqn) -> str:
        """One line, such as ``c:float32[2,4] = dot_general a, b``."""
        results = ", ".join(map(self.typed, eqn.outvars))
        return f"{results} = {eqn.primitive} {self.all(eqn.invars)}".rstrip()

    def _next(self) -> str:
        number, name = self._count, ""
        self._count += 1
        while True:
            number, digit = divmod(number, 26)
            name = string.ascii_lowercase[digit] + name
            if not number:
                return name


def type_text(aval: Any) -> str:
    """A dtype and a shape, such as ``float32[2,3]``."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def groups_text(groups: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(groups))) or "no group"


def levels_text(levels: Mapping[int, int]) -> str:
    by_level: dict[int, list[int]] = {}
    for group, level in sorted(levels.items()):
        by_level.setdefault(level, []).append(group)
    return "; ".join(f"level {level} on {groups_text(groups)}" for level, groups in sorted(by_level.items()))
