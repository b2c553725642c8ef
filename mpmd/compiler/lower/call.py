"""The primitive ``call_jaxpr``: one jaxpr calls another, without being traced again."""

from __future__ import annotations

from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import mlir

call_p = Primitive("call_jaxpr")
"""Calls the jaxpr ``call_jaxpr`` as it is; ``jaxpr_as_fun`` would trace it again. Profilers show ``name``."""
call_p.multiple_results = True


@call_p.def_effectful_abstract_eval
def _abstract_eval(*avals, call_jaxpr: ClosedJaxpr, name: str):
    # Without the mesh that the jaxpr was traced in: JAX would write the shardings that XLA chooses over that.
    return [aval.update(sharding=None) for aval in call_jaxpr.out_avals], call_jaxpr.effects


mlir.register_lowering(call_p, mlir.core_call_lowering, cacheable=False)
