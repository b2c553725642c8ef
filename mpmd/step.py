"""The train step as users hold it: called like the function it was made from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from mpmd.arguments import (
    Call,
    Signature,
    as_described,
    check_donated_once,
    check_specs,
    flatten_specs,
    to_host,
)
from mpmd.array import MpmdArray, StepRun
from mpmd.compile import CompiledStep, compile_step
from mpmd.ir import Plan, Spec
from mpmd.mesh import GroupMesh
from mpmd.report import Report, report
from mpmd.runtime.runtime import Runtime
from mpmd.runtime.sent import Key
from mpmd.runtime.worker import Handle, StepReply, StepRequest
from mpmd.timeline import Event
from mpmd.timing import Stopwatch
from mpmd.verify import verify


def mpmd_jit_with_loop(
    fun: Callable,
    mpmd_mesh: GroupMesh,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
) -> MpmdFunction:
    """Compiles a train step with a ``treduce`` loop for groups of devices.

    The result is called like ``fun``. What it returns are ``MpmdArray``s, which stay on the groups and can be
    passed to the next call; it returns at once. It computes what ``jax.jit(fun)`` computes. The first call,
    and each call with other shapes, dtypes or static arguments, compiles.

    Args:
      fun: an ordinary function of pytrees of arrays, with one ``treduce`` whose function marks its stages.
      mpmd_mesh: the groups: an ``MpmdMesh``, or what ``cluster.launch`` returns.
      in_specs: a pytree prefix of the tuple of (not static) arguments with a ``PartitionSpec`` over the axes
        of a group for each; ``None`` anywhere: replicated within the groups that hold it.
      out_specs: the same for the result; ``None`` anywhere: as the argument that it updates, or left to
        the compiler.
      static_argnums, static_argnames: hashable arguments that are not arrays.
      donate_argnums: arguments, such as the state, whose buffers the step may take over; they
        cannot be used after the call.

    Raises: ``TypeError`` when ``mpmd_mesh`` is no mesh of groups, ``ValueError`` for positions that ``fun``
      does not have. When called: ``CompileError`` (a ``ValueError``) for what cannot be compiled,
      ``TypeError`` for arguments that are not arrays.
    """
    if not hasattr(mpmd_mesh, "abstract_submesh"):
        raise TypeError(
            "mpmd_mesh must be mpmd.MpmdMesh(jax_mesh, axis), over this process's devices, or what "
            f"cluster.launch returns, got {mpmd_mesh!r}"
        )
    signature = Signature.of(fun, _ints(static_argnums), _names(static_argnames), _ints(donate_argnums))
    return MpmdFunction(fun, mpmd_mesh, in_specs, out_specs, signature)


class MpmdFunction:
    """What ``mpmd_jit_with_loop`` returns: compiles once for each kind of arguments it is called with."""

    def __init__(self, fun: Callable, mesh: GroupMesh, in_specs: Any, out_specs: Any, signature: Signature):
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._mesh = mesh
        self._in_specs = in_specs
        self._out_specs = out_specs
        self._signature = signature
        self._loaded: dict[Any, LoadedStep] = {}

    def compile(self, *args: Any, **kwargs: Any) -> LoadedStep:
        """Compiles for arguments like these, arrays or ``ShapeDtypeStruct``s, and has the groups load it."""
        return self._compile(self._signature.bind(args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.bind(args, kwargs)
        return self._compile(call).run(call)[0]

    def _compile(self, call: Call) -> LoadedStep:
        runtime = self._mesh.runtime  # another one after the mesh was closed
        if (runtime, call.key) not in self._loaded:
            compiled = self._compiled(call)
            traced = [as_described(var.aval) for var in compiled.traced.jaxpr.invars]
            stable = dataclasses.replace(call, avals=tuple(traced))
            loaded = self._loaded.get((runtime, stable.key))
            if loaded is None:
                loaded = LoadedStep(compiled, stable, self._mesh, self._signature)
            self._loaded |= {(runtime, call.key): loaded, (runtime, stable.key): loaded}
        return self._loaded[runtime, call.key]

    def _compiled(self, call: Call) -> CompiledStep:
        submesh, axis = self._mesh.abstract_submesh, self._mesh.mpmd_axis_name
        args, kwargs = jax.tree.unflatten(call.treedef, call.avals)
        fun = call.function(self._fun)
        in_specs = None
        if self._in_specs is not None:
            given = self._in_specs
            # ``args`` is a tuple, whatever sequence the specs come in.
            specs = flatten_specs(tuple(given) if isinstance(given, list) else given, args, "in_specs")
            specs += [None] * (len(call.avals) - len(specs))
            checked = check_specs(call.paths, call.avals, specs, submesh, axis, "in_specs")
            in_specs = [spec or () for spec in checked]

        def out_specs(out_shape: Any) -> list[Spec | None]:
            specs = flatten_specs(self._out_specs, out_shape, "out_specs")
            paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(out_shape)]
            return check_specs(paths, jax.tree.leaves(out_shape), specs, submesh, axis, "out_specs")

        wanted = None if self._out_specs is None else out_specs
        return compile_step(fun, args, kwargs, self._mesh, in_specs, wanted, call.donated)


class LoadedStep:
    """A step compiled for arguments of certain shapes and dtypes, and loaded by the groups.

    Called like the function it was made from, with arguments of just these shapes and dtypes.
    """

    def __init__(self, compiled: CompiledStep, call: Call, mesh: GroupMesh, signature: Signature):
        self._compiled = compiled
        self._mesh = mesh
        self._signature = signature
        self._expected = call
        self._out_avals = [as_described(var.aval) for var in compiled.traced.jaxpr.outvars]
        self._out_tree = jax.tree.structure(compiled.traced.out_shape)
        self._runtime = mesh.runtime
        self._loaded = loaded = self._runtime.load(compiled.program)
        self._plan = plan = loaded.program.plan
        watch = Stopwatch({**compiled.seconds, **loaded.seconds})
        with watch("verify"):
            self._verified = compiled.verified if plan is compiled.program.plan else verify(plan)
        self._seconds = watch.seconds
        groups = range(len(plan.programs))
        self._inputs = [
            [i for i, leaf in enumerate(plan.inputs) if leaf.name and group in leaf.mpmd_idxs]
            for group in groups
        ]
        self._outputs = [
            [i for i, leaf in enumerate(plan.outputs) if group in leaf.mpmd_idxs] for group in groups
        ]

    @property
    def compiled(self) -> CompiledStep:
        """What the compiler made; its specs may still be open."""
        return self._compiled

    @property
    def plan(self) -> Plan:
        """The verified programs of all groups; printable."""
        return self._plan

    def report(self) -> Report:
        """What each group does and needs, and how long it took to compile; printable."""
        fed_back = {argument for argument, _ in self._compiled.traced.fed_back}
        return report(self.plan, self._verified, fed_back, self._seconds, self._loaded.xla_seconds)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self._signature.bind(args, kwargs))[0]

    def profile(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Event, ...]]:
        """Runs a step, waits for it, and returns its result and when each group did what."""
        result, run = self.run(self._signature.bind(args, kwargs), profile=True)
        return result, tuple(event for reply in run.replies() for event in reply.events)

    def run(self, call: Call, profile: bool = False) -> tuple[Any, StepRun]:
        """Submits a step. Raises ``ValueError`` for arguments it was not compiled for."""
        self._expected.check_serves(call)
        check_donated_once(call)
        runtime = self._runtime
        results = [runtime.next_handle() for _ in self.plan.outputs]
        step = runtime.next_handle()  # only has to be another number for every step
        with runtime.sent:
            handles, puts, kept = self._feed(call, runtime)
            requests = {
                group: StepRequest(
                    self._loaded.number,
                    step,
                    tuple(handles[i] for i in inputs),
                    tuple(results[i] for i in outputs),
                    puts[group],
                    profile=profile,
                )
                for group, (inputs, outputs) in enumerate(zip(self._inputs, self._outputs, strict=True))
            }
            try:
                replies = runtime.submit(requests)
            except KeyboardInterrupt:  # what groups were sent and own now is known to some of them only
                runtime.sent.forget(kept)
                self._release(call, puts, set(kept.values()))
                raise
        self._keep(kept, replies.values())
        run = StepRun(replies)
        self._release(call, puts, set(kept.values()))
        submesh = self._mesh.abstract_submesh
        arrays = [
            MpmdArray(aval, leaf.mpmd_idxs, leaf.spec or (), submesh, runtime, handle, run)
            for aval, leaf, handle in zip(self._out_avals, self.plan.outputs, results, strict=True)
        ]
        return jax.tree.unflatten(self._out_tree, arrays), run

    def _feed(
        self, call: Call, runtime: Runtime
    ) -> tuple[dict[int, Handle], list[dict[Handle, np.ndarray]], dict[Key, Handle]]:
        """A handle for each argument that is read; for each group the values it does not have yet; and
        which of these it keeps for later calls.
        """
        handles: dict[int, Handle] = {}
        puts: list[dict[Handle, np.ndarray]] = [{} for _ in self.plan.programs]
        kept: dict[Key, Handle] = {}
        for i, (leaf, wanted) in enumerate(zip(call.leaves, self.plan.inputs, strict=True)):
            if wanted.name is None:
                continue
            if isinstance(leaf, MpmdArray) and leaf.is_on(runtime, wanted.mpmd_idxs):
                handles[i] = leaf.handle
                continue
            keep = isinstance(leaf, jax.Array) and not call.donated[i]
            if keep and (handle := runtime.sent.handle(leaf, wanted.mpmd_idxs)) is not None:
                handles[i] = handle
                continue
            handles[i] = runtime.next_handle()
            value = to_host(leaf, call.avals[i])
            if isinstance(leaf, np.ndarray) or call.donated[i]:
                value = value.copy()  # the caller may write to it, or it is a view of what will be deleted
            for group in wanted.mpmd_idxs:
                puts[group][handles[i]] = value
            if keep:
                kept[runtime.sent.note(leaf, wanted.mpmd_idxs, handles[i])] = handles[i]
        return handles, puts, kept

    def _keep(self, kept: Mapping[Key, Handle], replies: Iterable[Future[StepReply]]) -> None:
        """Has arrays sent again after a step that failed, perhaps before it took them in."""

        def settled(reply: Future[StepReply]) -> None:
            if reply.exception() is not None:
                sent.forget(kept)

        sent = self._runtime.sent
        for reply in replies if kept else ():
            reply.add_done_callback(settled)

    def _release(self, call: Call, puts: list[dict[Handle, np.ndarray]], kept: Collection[Handle]) -> None:
        """Gives up donated arguments, and the handles of those that were put for this step alone."""
        for i, leaf in enumerate(call.leaves):
            if call.donated[i] and isinstance(leaf, (jax.Array, MpmdArray)):
                leaf.delete()
        for handle in {handle for put in puts for handle in put}.difference(kept):
            groups = tuple(group for group, put in enumerate(puts) if handle in put)
            self._runtime.free(groups, handle)


def _ints(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
