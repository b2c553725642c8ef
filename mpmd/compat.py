"""The uses of JAX without a public name, or with different names in its versions.

Only this file reaches below JAX's public modules.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import traceback_util
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Primitive
from jax.sharding import AbstractMesh, Mesh

Function = TypeVar("Function", bound=Callable[..., Any])

NAMELESS = DebugInfo("mpmd", "mpmd", None, None)
"""For jaxprs whose arguments and results no longer belong to a user's function."""


_PROJECT = Path(__file__).parents[1]

for _hidden in (_PROJECT / "mpmd", _PROJECT / "cluster", contextlib.__file__, concurrent.futures.__path__[0]):
    traceback_util.register_exclusion(str(_hidden))


def api_boundary(function: Function) -> Function:
    """Hides the frames of this project and of JAX in the tracebacks of errors that leave ``function``.

    The user's frames stay, also frames of functions that ``function`` calls. The setting of JAX decides,
    ``JAX_TRACEBACK_FILTERING`` or ``jax.config.jax_traceback_filtering``: ``off`` hides nothing. JAX hides
    its frames by the same function, which has no public name. That function leaves the causes of an error as
    they are, and adds a note each time that an error is raised, as a failed step's is with each read result.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            notes[:] = [note for note in notes if traceback_util._simplified_tb_msg not in note]
            if traceback_util._filtering_mode() != "off":
                chain: list[BaseException] = [error]
                while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
                    chain.append(cause)
                    if cause.__traceback__:
                        cause.with_traceback(traceback_util.filter_traceback(cause.__traceback__))
            raise

    return traceback_util.api_boundary(checked)  # type: ignore[return-value]


def with_constants_as_inputs(closed: ClosedJaxpr) -> Jaxpr:
    """The jaxpr with its constants as its first inputs.

    Before JAX 0.12 the constants of a ``Jaxpr`` need no values; since then every constant has one.
    """
    jaxpr = closed.jaxpr
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=invars, debug_info=NAMELESS)


def with_scan_counts(
    params: Mapping[str, Any], num_consts: int, num_carry: int, num_xs: int, num_ys: int
) -> dict[str, Any]:
    """The parameters of a scan with other numbers of operands and results of each kind.

    JAX 0.11 replaced these numbers by trees that have a leaf for each operand, and for each result.
    """
    if "num_consts" in params:
        return {**params, "num_consts": num_consts, "num_carry": num_carry}
    from jax._src import flattree  # type: ignore[attr-defined]

    def leaves(*numbers: int) -> Any:
        return flattree.pack(tuple(map(flattree.nones, numbers)))

    return {**params, "ft_in": leaves(num_consts, num_carry, num_xs), "ft_out": leaves(num_carry, num_ys)}


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def replace_calls(
    primitive: Primitive, results_of: Callable[[Sequence[Any], Mapping[str, Any]], list[Any] | None]
) -> Callable[..., list[Any]]:
    """Replaces the results of a primitive by ``results_of(operands, parameters)``, unless that is ``None``.

    Returns the function that binds the primitive itself.

    A scan or a rematerialised function has to be replaced where a function calls it: later, within
    ``jax.grad``, ``jax.vmap`` or ``jax.checkpoint``, its body is another one. JAX has no public hook there.
    Rules for differentiation come too late for scans that nobody differentiates, and are private; functions
    such as ``jax.lax.scan`` may have been imported by name, and jaxprs that are evaluated do not call them.
    However a function calls it, the primitive is bound.
    """
    bind_to_equation = primitive.bind

    def bind(*operands: Any, **params: Any) -> list[Any]:
        results = results_of(operands, params)
        return bind_to_equation(*operands, **params) if results is None else results

    primitive.bind = bind  # type: ignore[method-assign]
    return bind_to_equation


def live_by_default(is_used: list[bool], eqn: JaxprEqn) -> tuple[list[bool], JaxprEqn | None, bool]:
    """The live operands and the rest of an equation by JAX's default rule, and whether it uses a ``Ref``."""
    from jax._src.effects import JaxprInputEffect
    from jax._src.interpreters import partial_eval

    uses_ref = any(isinstance(effect, JaxprInputEffect) for effect in eqn.effects)
    return *partial_eval._default_dce_rule(is_used, eqn), uses_ref


def expanded(eqn: JaxprEqn) -> ClosedJaxpr:
    """The function that a ``call_hi_primitive`` calls.

    In JAX 0.12 ``jnp.searchsorted`` is such an equation: its parameter is the function and no jaxpr.
    """
    primitive = eqn.params["_prim"]

    def of_leaves(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, leaves)))

    return jax.make_jaxpr(of_leaves)(*(atom.aval for atom in eqn.invars))


def current_context() -> Any:
    """The JAX settings that an equation traced here keeps; equations have no public constructor."""
    return jax.make_jaxpr(jax.lax.neg)(0.0).eqns[0].ctx


def mesh_of_refused_shard_map(trace: Callable[[], Any]) -> Any:
    """The mesh that a user's ``jax.shard_map`` names, if JAX refuses it while ``trace`` traces a function.

    JAX names the mesh in the text of the error alone, and leaves its own frames out of tracebacks.
    """
    mode = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        trace()
    except ValueError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    else:
        frames = []
    finally:
        jax.config.update("jax_traceback_filtering", mode)
    named = (f.f_locals.get("mesh") for f in frames if f.f_code.co_filename.endswith("shard_map.py"))
    return next((mesh for mesh in named if isinstance(mesh, Mesh | AbstractMesh)), None)


@contextlib.contextmanager
def with_lines_of_backward_rules() -> Iterator[None]:
    """Has equations of a ``custom_vjp``'s backward rule keep the lines of the rule, while JAX traces.

    JAX gives them the line at which the function was called, as it rightly does to transposed equations.
    """
    from jax._src import source_info_util
    from jax._src.interpreters import ad

    tables = (getattr(ad, "primitive_transposes", {}), getattr(ad, "fancy_transposes", {}))
    table = next(table for table in tables if ad.custom_lin_p in table)
    rule = table[ad.custom_lin_p]

    def with_own_lines(*args: Any, **params: Any) -> Any:
        here = source_info_util._source_info_context
        of_call = here.context
        here.context = source_info_util.new_source_info().replace(name_stack=of_call.name_stack)
        try:
            return rule(*args, **params)
        finally:
            here.context = of_call

    table[ad.custom_lin_p] = with_own_lines
    try:
        yield
    finally:
        table[ad.custom_lin_p] = rule


def key_impl_name(dtype) -> str:
    """The name of the random number generator of a key dtype, as ``jax.random.wrap_key_data`` takes it.

    ``jax.random.key_impl`` answers this for arrays only, not for the abstract values of a jaxpr.
    """
    return key_impl(dtype).name


def key_impl(dtype):
    """The random number generator of a key dtype, which ``jax.random`` reads from key arrays."""
    return dtype._impl


# A step is traced and lowered within its group's mesh and for its devices, whatever those of the caller are.
_OF_DEVICES = frozenset(
    """abstract_mesh_context_manager mesh_context_manager jax_default_device jax_disable_jit""".split()
)


def trace_context() -> Hashable:
    """Returns the part of JAX's configuration in this thread on which tracing and lowering depend.

    A function that was traced under one configuration must not run under another: the configuration is a part
    of the key under which ``jax.jit`` keeps functions, and has no public name. The implementation of keys
    that ``jax.random.PRNGKey`` uses, which ``jax.jit`` leaves out of its key, is added.
    """
    from jax._src import config

    named = zip(config.trace_context_names(), config.trace_context(), strict=True)
    impl = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]
    return (impl, *(value for name, value in named if name not in _OF_DEVICES))


def trace_context_for_threads() -> Callable[[], AbstractContextManager]:
    """Returns a function of contexts that give another thread this thread's ``trace_context``.

    JAX keeps the values of its contexts, such as ``jax.threefry_partitionable``, for each thread, and lowers
    under the values of the thread that compiles.
    """
    from jax._src import config

    names = frozenset(config.trace_context_names()) - _OF_DEVICES
    of_this_thread = [
        (state, state.value)
        for name, state in config.config_states.items()
        if name in names and state.value != state.get_global()
    ]

    def enter() -> AbstractContextManager:
        held = contextlib.ExitStack()
        for state, value in of_this_thread:
            held.enter_context(state(value))
        return held

    return enter


def stable_custom_calls() -> frozenset[str]:
    """The targets of the custom calls that ``jax.export`` writes, which no public name lists.

    ``jax.export`` refuses all but these targets, and its documentation names examples alone.
    """
    from jax._src.export import _export

    return frozenset(_export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE)


def keeps_compiled_on_disk() -> bool:
    """Whether JAX's persistent cache may have made an executable that JAX says it has compiled.

    JAX goes on with a cache that was configured once, until it is reset.
    """
    from jax._src import compilation_cache

    return compilation_cache.is_persistent_cache_enabled() or compilation_cache._cache is not None


def forget_lowered() -> None:
    """Has JAX keep nothing of functions that were lowered with ``keep_unused``, once they are compiled.

    In the cache of JAX 0.11 and later that pruned inputs are in, the value then is the key, which the cache
    holds weakly. So each such function would stay with its executable until ``jax.clear_caches``. The cache
    saves little: a function is lowered once here.
    """
    from jax._src.interpreters import pxla

    pxla._dce_jaxpr.cache_clear()


def compiled_for(
    compiled: jax.stages.Compiled, devices: Sequence[jax.Device], others: Sequence[jax.Device]
) -> jax.stages.Compiled:
    """Moves compiled code from ``devices`` to the devices ``others``, without compiling it again.

    JAX's public ``deserialize_and_load`` cannot name other devices than the devices in the compiled code.
    JAX's cache can, by options for the compiler. The bytes do not leave this process.

    Code that comes from bytes itself, as from JAX's persistent cache, is lost: a CPU then fails to run it.

    Raises: the error of JAX for code that has calls into Python.
    """
    from jax._src import compiler
    from jax.experimental import serialize_executable

    counterparts = {device.id: other for device, other in zip(devices, others, strict=True)}
    options = compiler.get_compile_options(1, len(others), [[other.id for other in others]])

    class Unpickler(serialize_executable._JaxPjrtUnpickler):
        def persistent_load(self, pid):
            if pid[0] == "exec":
                return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
            return counterparts[pid[1]] if pid[0] == "device" else super().persistent_load(pid)

    serialized, in_tree, out_tree = serialize_executable.serialize(compiled)
    unpickler = Unpickler(io.BytesIO(serialized), others[0].client, others)
    unloaded, arguments, no_kwargs = unpickler.load()
    loaded = unloaded.load()
    return with_any_sub_byte_layout(
        jax.stages.Compiled(loaded, [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)
    )


def with_any_sub_byte_layout(compiled: jax.stages.Compiled) -> jax.stages.Compiled:
    """``compiled``, which no longer compares the layouts of its inputs whose elements have less than a byte.

    Executables require layouts that name the bits of an element, 4 of an int4. The layouts of arrays that
    ``jax.device_put`` makes do not name them, though the bytes are the same. ``jax.jit`` does not compare
    layouts; JAX does so where code is compiled ahead of time, and has no public option for it.
    """
    executable: Any = compiled._executable
    executable._xla_in_layouts = [
        None if layout is not None and layout.sub_byte_element_size_in_bits else layout
        for layout in executable._xla_in_layouts
    ]
    return compiled


def export_two_bit_integers() -> None:
    """Has JAX's export format name int2 and uint2, which it does not know. Both sides have to call this."""
    from jax._src.export import serialization

    for number, dtype in ((120, np.dtype(jnp.int2)), (121, np.dtype(jnp.uint2))):
        if dtype not in serialization._dtype_to_dtype_kind:
            serialization.register_dtype_kind(dtype, number)


def use_cpu_collectives_at(host: str) -> None:
    """Makes the collectives of CPU devices listen at an address of this process.

    To be called before ``jax.distributed.initialize``. JAX has them listen where the host's name resolves to,
    often a loopback address that other nodes cannot reach, and has no public option for it.
    """
    from jax._src import distributed, xla_bridge
    from jaxlib import _jax

    def make_client():
        world = distributed.global_state.client
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=world, hostname=host)
        return xla_bridge.make_cpu_client(collectives)

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def register_array_type(
    array_type: type, key_type: type, values_of: Callable[[Sequence[Any]], Sequence[jax.Array]]
) -> None:
    """Makes JAX's functions take instances of a subclass of ``jax.Array`` by their values.

    JAX looks up by the type of an argument how to find its abstract value, its value in JAX's own types, and
    its value as a constant, and how to take keys apart. It has no public way to add a type that is no pytree.

    Args:
      array_type: its instances have ``shape``, ``dtype`` and ``weak_type``.
      key_type: its subclass for arrays of keys, with ``aval`` and, as ``_base_array``, the integers inside.
      values_of: the values of several instances as JAX's own arrays.
    """
    from jax._src import core, dtypes, tree_util
    from jax._src.interpreters import mlir, pxla

    def abstract_value(array: Any) -> Any:
        return core.ShapedArray(array.shape, array.dtype, weak_type=array.weak_type)

    def arguments(arrays: Any, shardings: Any, layouts: Any, copy_semantics: Any) -> Any:
        return pxla.shard_args(shardings, layouts, copy_semantics, values_of(arrays))

    def constant(val: Any, aval: Any) -> Any:
        (value,) = values_of([val])
        return mlir.get_constant_handler(type(value))(value, aval)

    def keys(aval: Any, integers: Any) -> jax.Array:
        return jax.random.wrap_key_data(*integers, impl=key_impl_name(aval.dtype))

    for each in (array_type, key_type):
        core.pytype_aval_mappings[each] = abstract_value
        dtypes.register_canonicalize_value_handler(each, None)
        pxla.shard_arg_handlers[each] = arguments
        mlir.register_constant_handler(each, constant)
    tree_util.dispatch_registry.register_node(key_type, lambda key: ((key._base_array,), key.aval), keys)


def with_weak_type(array: jax.Array) -> jax.Array:
    """The array, with a weak type as results of Python numbers have. No public function gives one."""
    from jax._src.lax import lax

    return lax._convert_element_type(array, weak_type=True)
