"""The train step as users hold it: called like the function it was made from."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax

from mpmd.arguments.call import Call
from mpmd.arguments.leaves import as_described
from mpmd.arguments.signature import CallSignature
from mpmd.arguments.specs import input_specs, output_specs
from mpmd.compiler.graph import Gather, PartialSums
from mpmd.compiler.pipeline import CompiledStep, compile_step
from mpmd.loaded_step import LoadedStep
from mpmd.mesh import GroupMesh
from mpmd.placement import Placement
from mpmd.runtime.protocol import Runtime


def mpmd_jit_with_loop(
    fun: Callable,
    mpmd_mesh: GroupMesh,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    partial_sums: PartialSums = "replicated",
    gather: Gather = "task",
) -> MpmdFunction:
    """Compiles a train step with a ``treduce`` loop, or another function, for groups of devices.

    The result is called like ``fun``. What it returns are ``MpmdArray``s, which stay on the groups and can be
    passed to the next call; it returns at once. It computes what ``jax.jit(fun)`` computes. The first call,
    and each call with other shapes, dtypes or static arguments, compiles.

    Args:
      fun: an ordinary function of pytrees of arrays, with one ``treduce`` whose function marks its stages. A
        function without ``treduce`` runs where the ``MpmdArray``s are that it is called with: averages, casts
        and norms of a train step's state leave it where it is. It is compiled anew for arrays elsewhere.
      mpmd_mesh: the groups: an ``MpmdMesh``, or what ``cluster.launch`` returns.
      in_specs: a pytree prefix of the tuple of (not static) arguments with a ``PartitionSpec`` over the axes
        of a group for each; ``None`` anywhere: replicated within the groups that hold it; without a loop,
        sharded as the ``MpmdArray`` that is passed.
      out_specs: the same for the result; ``None`` anywhere: as the argument that it updates, or left to
        the compiler.
      static_argnums, static_argnames: hashable arguments that are not arrays.
      donate_argnums: arguments, such as the state, whose buffers the step may take over; they
        cannot be used after the call.
      partial_sums: which accumulators hold partial sums over the devices of a group, which are reduced once
        per step rather than in every microbatch. ``"replicated"``: along mesh axes over which the batch is
        sharded and the sum, as a weight and its gradient, is not; this takes no memory. ``"all"``: also
        along axes that shard the sum, as for FSDP; each device then accumulates the whole gradient of its
        stages' weights instead of its shard, and reduces and scatters it once. ``"none"``.
      gather: when weights that are sharded over an axis of the batch, as for FSDP, are gathered along it.
        ``"task"``: in every task that reads them. ``"step"``: once per step and group, before its first
        task; from there to the last task that reads it, each device also holds the gathered weight.

    Raises: ``TypeError`` when ``mpmd_mesh`` is no mesh of groups, ``ValueError`` for positions that ``fun``
      does not have, and for another ``partial_sums`` or ``gather``. When called: ``CompileError`` (a
      ``ValueError``) for what cannot be compiled, ``TypeError`` for arguments that are not arrays, and,
      without a loop, ``ValueError`` for ``MpmdArray``s of another mesh.
    """
    if not hasattr(mpmd_mesh, "abstract_submeshes"):
        raise TypeError(
            "mpmd_mesh must be mpmd.MpmdMesh(jax_mesh, axis), over this process's devices, or what "
            f"cluster.launch returns, got {mpmd_mesh!r}"
        )
    signature = CallSignature.of(fun, _ints(static_argnums), _names(static_argnames), _ints(donate_argnums))
    for option, value, allowed in (
        ("partial_sums", partial_sums, get_args(PartialSums)),
        ("gather", gather, get_args(Gather)),
    ):
        if value not in allowed:
            raise ValueError(f"{option} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return MpmdFunction(
        fun=fun,
        mesh=mpmd_mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        signature=signature,
        partial_sums=partial_sums,
        gather=gather,
    )


jit = mpmd_jit_with_loop


class MpmdFunction:
    """What ``mpmd_jit_with_loop`` returns: compiles once for each kind of arguments it is called with."""

    def __init__(
        self,
        fun: Callable,
        mesh: GroupMesh,
        in_specs: Any,
        out_specs: Any,
        signature: CallSignature,
        partial_sums: PartialSums,
        gather: Gather,
    ):
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._mesh = mesh
        self._in_specs = in_specs
        self._out_specs = out_specs
        self._signature = signature
        self._partial_sums = partial_sums
        self._gather = gather
        # A mesh that was closed has another runtime when it is used again; nothing here keeps the old one.
        self._loaded: weakref.WeakKeyDictionary[Runtime, dict[Any, LoadedStep]] = weakref.WeakKeyDictionary()

    def compile(self, *args: Any, **kwargs: Any) -> LoadedStep:
        """Compiles for arguments like these, arrays or ``ShapeDtypeStruct``s, and has the groups load it."""
        return self._load(self._signature.bind(args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.bind(args, kwargs)
        return self._load(call).submit(call)[0]

    def _load(self, call: Call) -> LoadedStep:
        loaded = self._loaded.setdefault(self._mesh.runtime, {})
        enable_x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        if step := loaded.get((enable_x64, call.key)):
            return step
        # Without a loop, what runs where follows from where the arguments are.
        placements = call.placements(self._mesh.runtime)
        if step := loaded.get((enable_x64, call.key, placements)):
            return step
        compiled = self._compile(call, placements)
        where = () if compiled.traced.loop else (placements,)
        # The state's weak types may change with the first step: the step was traced as for later ones.
        traced = compiled.traced.argument_leaves
        stable = call.described_by(tuple(map(as_described, traced)))
        if (enable_x64, stable.key, *where) not in loaded:
            loaded[enable_x64, stable.key, *where] = LoadedStep(compiled, stable, self._mesh, self._signature)
        step = loaded[enable_x64, call.key, *where] = loaded[enable_x64, stable.key, *where]
        return step

    def _compile(self, call: Call, held: Sequence[Placement]) -> CompiledStep:
        submeshes, axis = self._mesh.abstract_submeshes, self._mesh.mpmd_axis_name
        axis_names = submeshes[0].axis_names
        args, kwargs = jax.tree.unflatten(call.treedef, call.avals)
        in_specs = out_specs = None
        if self._in_specs is not None:
            in_specs = input_specs(self._in_specs, call, axis_names, axis)
        if self._out_specs is not None:
            out_specs = functools.partial(
                output_specs, self._out_specs, axis_names=axis_names, mpmd_axis_name=axis
            )
        return compile_step(
            fun=call.function(self._fun),
            args=args,
            kwargs=kwargs,
            submeshes=submeshes,
            in_specs=in_specs,
            out_specs=out_specs,
            donated=call.donated,
            partial_sums=self._partial_sums,
            gather=self._gather,
            held=held,
        )


def _ints(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
