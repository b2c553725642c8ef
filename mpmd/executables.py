"""Turns equations into executables: functions over flat arrays, one for all tasks that compute the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, Var
from jax.interpreters import mlir

from mpmd.compat import key_impl_name
from mpmd.ir import Aval, Executable, Spec
from mpmd.jaxpr import avals_of, fingerprint, make_jaxpr
from mpmd.program import Function


@dataclasses.dataclass
class ExecutableTable:
    """The executables of a plan.

    ``specs`` has the known sharding of variables; those of other variables are ``default``.
    """

    specs: Mapping[Var, Spec]
    default: Spec | None
    executables: dict[str, Executable] = dataclasses.field(default_factory=dict)
    functions: dict[str, Function] = dataclasses.field(default_factory=dict)
    _known: dict[Any, str] = dataclasses.field(default_factory=dict)
    _avals: dict[Any, Aval] = dataclasses.field(default_factory=dict)

    def add(self, name: str, invars: Sequence[Var], eqns: Sequence[JaxprEqn], outvars: Sequence[Var]) -> str:
        """Returns the name of an executable for the equations: ``name``, or that of an equal one."""
        in_specs, out_specs = self._specs_of(invars), self._specs_of(outvars)
        key = (fingerprint(invars, eqns, outvars), in_specs, out_specs)
        if key not in self._known:
            name = self._unused(name)
            self._known[key] = name
            avals = self._avals_of(invars), self._avals_of(outvars)
            self.executables[name] = Executable(name, *avals, (), in_specs, out_specs)
            self.functions[name] = _function(name, invars, eqns, outvars)
        return self._known[key]

    def _unused(self, name: str) -> str:
        """The same task may compute something else on the groups where it ends or begins the pipeline."""
        candidate, count = name, 1
        while candidate in self.executables:
            count += 1
            candidate = f"{name}'{count}"
        return candidate

    def _avals_of(self, variables: Sequence[Var]) -> tuple[Aval, ...]:
        self._avals.update((var.aval, to_aval(var)) for var in variables if var.aval not in self._avals)
        return tuple(self._avals[var.aval] for var in variables)

    def _specs_of(self, variables: Sequence[Var]) -> tuple[Spec | None, ...]:
        return tuple(self.specs.get(var, self.default) for var in variables)


def to_aval(var: Any) -> Aval:
    """The shape and dtype of a variable's value in the plan, where keys are their raw data.

    Args:
      var: a variable, or anything else with an ``aval``.
    """
    aval = raw(var.aval)
    return Aval(tuple(aval.shape), str(aval.dtype), aval.dtype.itemsize)


def is_key(aval: Any) -> bool:
    """Whether values are typed random number generator keys."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def raw(aval: Any) -> jax.ShapeDtypeStruct:
    """The abstract value as the plan has it: keys as the integers inside."""
    described = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.eval_shape(jax.random.key_data, described) if is_key(aval) else described


def encode(value: Any) -> Any:
    """A value as the plan has it."""
    return jax.random.key_data(value) if is_key(value) else value


def decode(value: Any, aval: Any) -> Any:
    """The inverse of ``encode`` for a value of type ``aval``."""
    return jax.random.wrap_key_data(value, impl=key_impl_name(aval.dtype)) if is_key(aval) else value


call_p = Primitive("call_jaxpr")
"""Calls the jaxpr ``call_jaxpr`` as it is; ``jaxpr_as_fun`` would trace it again. Profilers show ``name``."""
call_p.multiple_results = True


@call_p.def_effectful_abstract_eval
def _abstract_eval(*avals, call_jaxpr: ClosedJaxpr, name: str):
    return call_jaxpr.out_avals, call_jaxpr.effects


mlir.register_lowering(call_p, mlir.core_call_lowering, cacheable=False)


def _function(name: str, invars: Sequence[Var], eqns: Sequence[JaxprEqn], outvars: Sequence[Var]) -> Function:
    jaxpr = ClosedJaxpr(make_jaxpr(invars, eqns, outvars), ())
    avals = avals_of(invars)

    def function(*arguments):
        decoded = (decode(value, aval) for value, aval in zip(arguments, avals, strict=True))
        return tuple(map(encode, call_p.bind(*decoded, call_jaxpr=jaxpr, name=name)))

    function.__name__ = function.__qualname__ = name
    return function
