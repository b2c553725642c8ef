"""Functions in a portable form: single equations, of which equal ones share one, and all together."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import jax
from jax import export
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.jaxprs.equations import Atom, avals_of, make_jaxpr, operands, subjaxprs
from mpmd.compiler.lower.fingerprint import fingerprint
from mpmd.compiler.lower.task_function import task_function
from mpmd.ir.plan import Executable
from mpmd.keys import raw
from mpmd.program import Function, exported
from mpmd.replay.exported import record_of, types_of
from mpmd.replay.modules import MAIN
from mpmd.replay.record import Export, Unportable
from mpmd.sharding import to_sharding, within

_IDENTITIES = frozenset({"sharding_constraint", "layout_constraint", "reshard", "mesh_cast"})
"""Equations about the placement of a value, which the value does not depend on."""


@dataclasses.dataclass(frozen=True)
class Portable:
    """The functions of a task in a portable form.

    Attributes:
      exports: each function, or the reason why it has none.
      codes: the files with their modules.
      executable: the position of the function of all equations together; ``None`` where it has none.
      without_executable: the reason for that, else empty.
    """

    exports: tuple[Export | Unportable, ...]
    codes: Mapping[str, bytes]
    executable: int | None
    without_executable: str


class Exports:
    """The functions that one task needs.

    They share a module, since most of the time to export one is that for a module.

    Args:
      submesh: that of the group. Equations that name devices are exported for as many, others for one.
      platform: that of the group. Single equations are exported for CPUs, too.

    Attributes:
      codes: the files with the modules that are exported.
    """

    def __init__(self, submesh: AbstractMesh, platform: str):
        self._submesh = submesh
        self._platform = platform
        self._known: dict[Hashable, int] = {}
        self._equations: list[_Equation] = []
        self._done: dict[int, Export | Unportable] = {}
        self.codes: dict[str, bytes] = {}

    def of(self, eqn: JaxprEqn) -> int:
        """The number of an equation's function.

        The function's arguments are the variables that the equation reads, each once; typed keys are the
        integers inside.
        """
        # A variable that nothing reads is no result that a jaxpr can have.
        eqn = eqn.replace(outvars=[Var(var.aval) for var in eqn.outvars])
        reads = tuple(dict.fromkeys(operands(eqn)))
        key = fingerprint(reads, [eqn], eqn.outvars)
        if key not in self._known:
            self._known[key] = len(self._equations)
            self._equations.append(_Equation(eqn, reads))
        return self._known[key]

    def portable(self, jaxpr: Jaxpr, executable: Executable) -> Portable:
        """All functions, and that of all equations together; to be called once, after ``of`` of all.

        Args:
          jaxpr: has all equations.
          executable: that of the plan, for the group's devices.
        """
        exports = self.of_equations()
        whole = self._whole(jaxpr, executable, exports)
        is_there = isinstance(whole, Export)
        return Portable(
            exports=(*exports, whole) if is_there else exports,
            codes=self.codes,
            executable=len(exports) if is_there else None,
            without_executable="" if isinstance(whole, Export) else whole.reason,
        )

    def of_equations(self) -> tuple[Export | Unportable, ...]:
        """The functions of the equations, by their numbers."""
        platforms = tuple(dict.fromkeys((self._platform, "cpu")))
        together = [n for n, equation in enumerate(self._equations) if not equation.is_exported_alone]
        self._add(together, platforms)
        for number, equation in enumerate(self._equations):
            if equation.is_exported_alone:
                self._add([number], platforms)
        return tuple(self._done[number] for number in range(len(self._equations)))

    def _add(self, numbers: Sequence[int], platforms: tuple[str, ...]) -> None:
        """Exports equations in one module; where one has no portable form, in several without it."""
        if not numbers:
            return
        try:
            self._export(numbers, platforms)
        except Exception as error:  # of whatever kind: the reason is written, and the other equations are
            if len(numbers) > 1:
                middle = len(numbers) // 2
                self._add(numbers[:middle], platforms)
                self._add(numbers[middle:], platforms)
            elif len(platforms) > 1:
                self._add(numbers, platforms[:1])  # a kernel of one platform
            else:
                self._done[numbers[0]] = Unportable(_reason(error))

    def _export(self, numbers: Sequence[int], platforms: Sequence[str]) -> None:
        equations = [self._equations[number] for number in numbers]
        names = [f"mpmd_equation_{number}" for number in numbers]
        functions = [each.function(name) for each, name in zip(equations, names, strict=True)]
        arguments = [[raw(aval) for aval in avals_of(each.reads)] for each in equations]

        def all_of_them(*of_each):
            return [f(*of_one) for f, of_one in zip(functions, of_each, strict=True)]

        if len(numbers) == 1:
            names = [MAIN]
        if self._submesh.size > 1 and any(each.names_devices for each in equations):
            replicated = to_sharding((), self._submesh)
            jitted = jax.jit(all_of_them, in_shardings=replicated, out_shardings=replicated, keep_unused=True)
            with within(self._submesh):
                module = export.export(jitted, platforms=platforms)(*arguments)
            spec: tuple[()] | None = ()
        else:
            jitted = jax.jit(all_of_them, keep_unused=True)
            module = export.export(jitted, platforms=platforms)(*arguments)
            spec = None
        file = self._file(module)
        inputs, outputs = iter(module.in_avals), iter(module.out_avals)
        for number, name, each in zip(numbers, names, equations, strict=True):
            in_types = types_of([(next(inputs), spec) for _ in each.reads])
            out_types = types_of([(next(outputs), spec) for _ in each.eqn.outvars])
            self._done[number] = record_of(module, file, name, in_types, out_types)

    def _whole(
        self, jaxpr: Jaxpr, executable: Executable, exports: Sequence[Export | Unportable]
    ) -> Export | Unportable:
        for equation, made in zip(self._equations, exports, strict=True):
            if isinstance(made, Unportable):
                return Unportable(f"neither has {equation.eqn.primitive}: {made.reason}")
        try:
            function = task_function(jaxpr, executable.name)
            module = exported(function, executable, self._submesh, self._platform)
        except Exception as error:  # as of one equation
            return Unportable(_reason(error))
        inputs = types_of(zip(module.in_avals, executable.in_specs, strict=True))
        outputs = types_of(zip(module.out_avals, executable.out_specs, strict=True))
        return record_of(module, self._file(module), MAIN, inputs, outputs)

    def _file(self, module: export.Exported) -> str:
        """The name of a new file with a module."""
        name = f"{len(self.codes)}.mlir"
        self.codes[name] = module.mlir_module_serialized
        return name


@dataclasses.dataclass(frozen=True)
class _Equation:
    """An equation, with the variables that it reads."""

    eqn: JaxprEqn
    reads: tuple[Var, ...]

    @property
    def names_devices(self) -> bool:
        """Whether it computes with what each device holds."""
        return _names_devices(self.eqn)

    @property
    def is_exported_alone(self) -> bool:
        """Whether its module has something that others must not have: devices, or an order of effects."""
        return bool(self.eqn.effects) or self.names_devices

    def function(self, name: str) -> Function:
        eqns, outvars = [self.eqn], list[Atom](self.eqn.outvars)
        if self.eqn.primitive.name in _IDENTITIES:
            eqns, outvars = [], list(self.eqn.invars)
        return task_function(make_jaxpr(self.reads, eqns, outvars), name)


def _names_devices(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "shard_map" or any(
        _names_devices(inner) for jaxpr in subjaxprs(eqn) for inner in jaxpr.eqns
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
