"""Turns equations into executables: functions over flat arrays, one for all tasks that compute the same."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import AbstractMesh

from mpmd.compiler.jaxprs.equations import Atom, all_eqns, aval_of, avals_of, make_jaxpr
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.lower.call import call_p
from mpmd.compiler.lower.fingerprint import fingerprint
from mpmd.compiler.lower.group_meshes import GroupMeshes
from mpmd.ir.names import variant_name
from mpmd.ir.plan import Aval, Executable, Spec
from mpmd.ir.specs import fitting
from mpmd.keys import decode, encode, to_aval
from mpmd.language.callbacks import PYTHON_CALLS, callback_of
from mpmd.program import Function


@dataclasses.dataclass
class ExecutableTable:
    """The executables of a plan.

    Attributes:
      meshes: the groups' submeshes. Groups with equal submeshes share an executable.
      specs: the known sharding of variables.
      python_calls: the callbacks that are part of executables, with the user's lines.
      default: the spec of arrays without a known one on groups of several devices; ``None`` leaves it to the
        group's compiler. Scalars, and arrays on one device, need no spec.
    """

    meshes: GroupMeshes
    specs: Mapping[Var, Spec]
    default: Spec | None
    executables: dict[str, Executable] = dataclasses.field(default_factory=dict)
    functions: dict[str, Function] = dataclasses.field(default_factory=dict)
    python_calls: dict[str, None] = dataclasses.field(default_factory=dict)
    _known: dict[Any, str] = dataclasses.field(default_factory=dict)
    _avals: dict[Any, Aval] = dataclasses.field(default_factory=dict)

    def add(
        self,
        name: str,
        mpmd_idx: int,
        invars: Sequence[Var],
        eqns: Sequence[JaxprEqn],
        outvars: Sequence[Var],
        callback_operands: Sequence[Var],
        stands_for: Mapping[Var, Var] = MappingProxyType({}),
    ) -> str:
        """Adds an executable for equations on a group, unless it has an equal one; returns its name.

        Args:
          eqns: the equations. The executable leaves their callbacks out.
          callback_operands: the operands of the callbacks. They become further outputs, replicated.
          stands_for: for variables that stand for another microbatch's value, the variables of the step.
        """
        eqns = self.meshes.moved([eqn for eqn in eqns if callback_of(eqn) is None], mpmd_idx)
        in_specs, out_specs = (
            tuple(self.spec_of(stands_for.get(var, var), mpmd_idx) for var in variables)
            for variables in (invars, outvars)
        )
        outvars, out_specs = [*outvars, *callback_operands], (*out_specs, *((),) * len(callback_operands))
        key = (fingerprint(invars, eqns, outvars), in_specs, out_specs, self.meshes.submeshes[mpmd_idx])
        if key not in self._known:
            name = self._unused(name)
            self._known[key] = name
            self.executables[name] = Executable(
                name=name,
                inputs=self._avals_of(invars),
                outputs=self._avals_of(outvars),
                donated=(),
                in_specs=in_specs,
                out_specs=out_specs,
            )
            self.functions[name] = function_of(name, invars, eqns, outvars)
            self.python_calls.update(dict.fromkeys(python_calls(eqns)))
        return self._known[key]

    def _unused(self, name: str) -> str:
        """The same task may compute something else on the groups where it ends or begins the pipeline."""
        variants = (variant_name(name, number) for number in itertools.count(1))
        return next(variant for variant in variants if variant not in self.executables)

    def _avals_of(self, variables: Sequence[Var]) -> tuple[Aval, ...]:
        self._avals.update((var.aval, to_aval(var)) for var in variables if var.aval not in self._avals)
        return tuple(self._avals[var.aval] for var in variables)

    def spec_of(self, var: Var, mpmd_idx: int) -> Spec | None:
        """The spec of a variable on a group; ``None`` where its compiler chooses."""
        submesh, shape = self.meshes.submeshes[mpmd_idx], aval_of(var).shape
        spec = self.specs.get(var, self.default if submesh.size > 1 and shape else ())
        return None if spec is None else fitting(spec, shape, submesh.shape)


def python_calls(eqns: Iterable[JaxprEqn]) -> Iterator[str]:
    return (
        f"{eqn.primitive} at {where(eqn)}" for eqn in all_eqns(eqns) if eqn.primitive.name in PYTHON_CALLS
    )


def function_of(
    name: str, invars: Sequence[Var], eqns: Sequence[JaxprEqn], outvars: Sequence[Atom]
) -> Function:
    """Typed keys among the arguments and results are passed as the integers inside."""
    jaxpr = ClosedJaxpr(make_jaxpr(invars, eqns, outvars), ())
    avals = avals_of(invars)

    def function(*arguments):
        decoded = (decode(value, aval) for value, aval in zip(arguments, avals, strict=True))
        return tuple(map(encode, call_p.bind(*decoded, call_jaxpr=jaxpr, name=name)))

    function.__name__ = function.__qualname__ = name
    return function


def on_group(jaxpr: Jaxpr, submeshes: Sequence[AbstractMesh], mpmd_idx: int) -> Jaxpr:
    """Returns the equations of a task as its group runs them: on its submesh, without the driver's callbacks.

    Args:
      jaxpr: the task's jaxpr in ``Program.jaxprs``.
      submeshes: the submeshes of all groups.
    """
    eqns = [eqn for eqn in jaxpr.eqns if callback_of(eqn) is None]
    return make_jaxpr(jaxpr.invars, GroupMeshes(submeshes).moved(eqns, mpmd_idx), jaxpr.outvars)


def task_function(jaxpr: Jaxpr, name: str) -> Function:
    return function_of(name, jaxpr.invars, jaxpr.eqns, jaxpr.outvars)
