"""Functions in a portable form: single equations, of which equal ones share one, and all together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import jax
from jax import export
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.jaxprs.equations import Atom, avals_of, make_jaxpr, operands, subjaxprs
from mpmd.compiler.lower.fingerprint import fingerprint
from mpmd.compiler.lower.task_function import task_function
from mpmd.ir.plan import Executable, Spec
from mpmd.keys import raw
from mpmd.program import exported
from mpmd.replay.exported import record_of
from mpmd.replay.record import Export
from mpmd.sharding import to_sharding, within

_IDENTITIES = frozenset({"sharding_constraint", "layout_constraint", "reshard", "mesh_cast"})
"""Equations about the placement of a value, which the value does not depend on."""


class Exports:
    """The functions that one task needs.

    Args:
      submesh: that of the group. Equations that name devices are exported for as many, others for one.
      platform: that of the group. Single equations are exported for CPUs, too.

    Attributes:
      done: the record and the code of each, by its number.
    """

    def __init__(self, submesh: AbstractMesh, platform: str):
        self._submesh = submesh
        self._platform = platform
        self._known: dict[Hashable, int | str] = {}
        self.done: list[tuple[Export, bytes]] = []
        self._reasons: list[str] = []

    def of(self, eqn: JaxprEqn) -> int | str:
        """The number of an equation's function, or the reason why it has none.

        The function's arguments are the variables that the equation reads, each once; typed keys are the
        integers inside.
        """
        # A variable that nothing reads is no result that a jaxpr can have.
        eqn = eqn.replace(outvars=[Var(var.aval) for var in eqn.outvars])
        reads = list(dict.fromkeys(operands(eqn)))
        key = fingerprint(reads, [eqn], eqn.outvars)
        if key not in self._known:
            here, anywhere = (self._platform,), dict.fromkeys((self._platform, "cpu"))
            self._known[key] = made = self._add(
                lambda: self._single(eqn, reads, tuple(anywhere)),
                lambda: self._single(eqn, reads, here),  # a kernel of one platform
            )
            if isinstance(made, str):
                self._reasons.append(f"neither has {eqn.primitive}: {made}")
        return self._known[key]

    def of_all(self, jaxpr: Jaxpr, executable: Executable) -> int | str:
        """The number of the function of all equations together, for the group's devices, or the reason.

        To be called after ``of`` of all equations.
        """
        if self._reasons:
            return self._reasons[0]

        def make() -> tuple[Export, bytes]:
            function = task_function(jaxpr, executable.name)
            whole = exported(function, executable, self._submesh, self._platform)
            return _recorded(whole, executable.in_specs, executable.out_specs)

        return self._add(make)

    def _add(self, *makes: Callable[[], tuple[Export, bytes]]) -> int | str:
        """The number of the first that can be made, or the reason why the last cannot."""
        reason = ""
        for make in makes:
            try:
                self.done.append(make())
                return len(self.done) - 1
            except Exception as error:  # of whatever kind: the reason is written, and the other equations are
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return reason

    def _single(self, eqn: JaxprEqn, reads: Sequence[Var], platforms: Sequence[str]) -> tuple[Export, bytes]:
        eqns, outvars = [eqn], list[Atom](eqn.outvars)
        if eqn.primitive.name in _IDENTITIES:
            eqns, outvars = [], list(eqn.invars)
        function = task_function(make_jaxpr(reads, eqns, outvars), eqn.primitive.name)
        arguments = [raw(aval) for aval in avals_of(reads)]
        if not _names_devices(eqn) or self._submesh.size == 1:
            jitted = jax.jit(function, keep_unused=True)
            return _recorded(export.export(jitted, platforms=platforms)(*arguments), None, None)
        replicated = to_sharding((), self._submesh)
        jitted = jax.jit(function, in_shardings=replicated, out_shardings=replicated, keep_unused=True)
        with within(self._submesh):
            on_devices = export.export(jitted, platforms=platforms)(*arguments)
        return _recorded(on_devices, ((),) * len(reads), ((),) * len(outvars))


def _recorded(
    of_jax: export.Exported,
    in_specs: Sequence[Spec | None] | None,
    out_specs: Sequence[Spec | None] | None,
) -> tuple[Export, bytes]:
    return record_of(of_jax, in_specs, out_specs), of_jax.mlir_module_serialized


def _names_devices(eqn: JaxprEqn) -> bool:
    """Whether an equation computes with what each device holds."""
    return eqn.primitive.name == "shard_map" or any(
        _names_devices(inner) for jaxpr in subjaxprs(eqn) for inner in jaxpr.eqns
    )
