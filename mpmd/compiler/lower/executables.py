"""Turns jaxprs into executables: functions over flat arrays, one for all tasks that compute the same."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import all_eqns, aval_of, avals_of, closed, variables
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.lower.call import call_p
from mpmd.compiler.lower.fingerprint import fingerprint
from mpmd.compiler.lower.group_meshes import GroupMeshes
from mpmd.ir.names import variant_name
from mpmd.ir.plan import Executable, Spec
from mpmd.ir.specs import fitting
from mpmd.keys import decode, encode, to_aval
from mpmd.language.callbacks import PYTHON_CALLS
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

    def add(
        self,
        name: str,
        mpmd_idx: int,
        jaxpr: Jaxpr,
        num_outputs: int,
        stands_for: Mapping[Var, Var] = MappingProxyType({}),
    ) -> str:
        """Adds an executable for a task of a group, unless it has an equal one; returns its name.

        Args:
          jaxpr: the task. The executable leaves its callbacks out.
          num_outputs: the number of values among its results. The results behind these are the operands of
            callbacks, which become replicated outputs.
          stands_for: for variables that stand for another microbatch's value, the variables of the step.
        """
        jaxpr = self.meshes.on_group(jaxpr, mpmd_idx)
        outvars = variables(jaxpr.outvars)
        in_specs, out_specs = (
            tuple(self.spec_of(stands_for.get(var, var), mpmd_idx) for var in named)
            for named in (jaxpr.invars, outvars[:num_outputs])
        )
        out_specs += ((),) * (len(outvars) - num_outputs)
        key = (fingerprint(jaxpr), in_specs, out_specs, self.meshes.submeshes[mpmd_idx])
        if key not in self._known:
            name = self._unused(name)
            self._known[key] = name
            self.executables[name] = Executable(
                name=name,
                inputs=tuple(map(to_aval, jaxpr.invars)),
                outputs=tuple(map(to_aval, outvars)),
                donated=(),
                in_specs=in_specs,
                out_specs=out_specs,
            )
            self.functions[name] = task_function(jaxpr, name)
            self.python_calls.update(dict.fromkeys(python_calls(jaxpr.eqns)))
        return self._known[key]

    def _unused(self, name: str) -> str:
        """The same task may compute something else on the groups where it ends or begins the pipeline."""
        variants = (variant_name(name, number) for number in itertools.count(1))
        return next(variant for variant in variants if variant not in self.executables)

    def spec_of(self, var: Var, mpmd_idx: int) -> Spec | None:
        """The spec of a variable on a group; ``None`` where its compiler chooses."""
        submesh, shape = self.meshes.submeshes[mpmd_idx], aval_of(var).shape
        spec = self.specs.get(var, self.default if submesh.size > 1 and shape else ())
        return None if spec is None else fitting(spec, shape, submesh.shape)


def python_calls(eqns: Iterable[JaxprEqn]) -> Iterator[str]:
    return (
        f"{eqn.primitive} at {where(eqn)}" for eqn in all_eqns(eqns) if eqn.primitive.name in PYTHON_CALLS
    )


def task_function(jaxpr: Jaxpr, name: str) -> Function:
    """Typed keys among the arguments and results are passed as the integers inside."""
    avals, call = avals_of(jaxpr.invars), closed(jaxpr)

    def function(*arguments):
        decoded = (decode(value, aval) for value, aval in zip(arguments, avals, strict=True))
        return tuple(map(encode, call_p.bind(*decoded, call_jaxpr=call, name=name)))

    function.__name__ = function.__qualname__ = name
    return function
