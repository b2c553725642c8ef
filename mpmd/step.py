"""The train step as users hold it: called like the function it was made from."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, get_args

import jax

from mpmd.arguments.call import Call
from mpmd.arguments.leaves import as_described, host_value
from mpmd.arguments.signature import CallSignature
from mpmd.arguments.specs import input_specs, output_specs
from mpmd.array import MpmdArray, StepFuture
from mpmd.compiler.graph import Gather, PartialSums
from mpmd.compiler.pipeline import CompiledStep, compile_step
from mpmd.events import Event
from mpmd.explanation import Explanation, Report, explain_plan, report
from mpmd.ir import Plan
from mpmd.mesh import GroupMesh
from mpmd.routes import Topology
from mpmd.runtime.argument_cache import Delivery
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Handle, StepRequest
from mpmd.stopwatch import Stopwatch
from mpmd.verify import verify


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
      ``ValueError``) for what cannot be compiled, ``TypeError`` for arguments that are not arrays.
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
        if (enable_x64, call.key) not in loaded:
            compiled = self._compile(call)
            # The state's weak types may change with the first step: the step was traced as for later ones.
            traced = compiled.traced.arguments
            stable = call.described_by(tuple(as_described(argument.var.aval) for argument in traced))
            if (enable_x64, stable.key) not in loaded:
                loaded[enable_x64, stable.key] = LoadedStep(compiled, stable, self._mesh, self._signature)
            loaded[enable_x64, call.key] = loaded[enable_x64, stable.key]
        return loaded[enable_x64, call.key]

    def _compile(self, call: Call) -> CompiledStep:
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
        )


class LoadedStep:
    """A step compiled for arguments of certain shapes and dtypes, and loaded by the groups.

    Called like the function it was made from, with arguments of just these shapes and dtypes. When it is
    dropped, the groups drop the step's executables.
    """

    def __init__(self, compiled: CompiledStep, call: Call, mesh: GroupMesh, signature: CallSignature):
        self._compiled = compiled
        self._mesh = mesh  # whose groups run as long as it is held and not closed
        self._signature = signature
        self._expected = call
        self._out_avals = [as_described(result.var.aval) for result in compiled.traced.results]
        self._out_tree = jax.tree.structure(compiled.traced.out_shape)
        runtime = mesh.runtime
        self._runtime = weakref.ref(runtime)  # which the mesh keeps until it is closed
        self._loaded = loaded = runtime.load(compiled.program)
        weakref.finalize(self, _unload, self._runtime, loaded.number).atexit = False
        resolved = loaded.program.plan
        watch = Stopwatch({**compiled.seconds, **loaded.seconds})
        with watch("verify"):
            self._verified = compiled.verified if resolved is compiled.program.plan else verify(resolved)
        self._seconds = watch.seconds
        self._plan = plan = loaded.plan
        groups = range(len(plan.programs))
        self._inputs = [tuple(plan.inputs_of(group)) for group in groups]
        self._outputs = [tuple(plan.outputs_of(group)) for group in groups]

    @property
    def compiled(self) -> CompiledStep:
        """What the compiler made; its specs may still be open."""
        return self._compiled

    @property
    def plan(self) -> Plan:
        """The verified programs of all groups, with what XLA needs to run them; printable."""
        return self._plan

    @property
    def topology(self) -> Topology:
        """The processes of the groups that have loaded the step."""
        return self._mesh.topology

    def report(self) -> Report:
        """What each group does and needs, and how long it took to compile; printable.

        It asks the allocators of the groups' devices for their peaks so far; those of CPUs do not count them.
        """
        runtime = self._runtime()
        return report(
            plan=self.plan,
            topology=self.topology,
            verified=self._verified,
            updated={argument for argument, _ in self._compiled.traced.carried_state},
            seconds=self._seconds,
            xla_seconds=self._loaded.xla_seconds,
            holdings=self._loaded.holdings,
            measured_peaks=runtime.measured_peaks() if runtime else (None,) * len(self.plan.programs),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.submit(self._signature.bind(args, kwargs))[0]

    def profile(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Event, ...]]:
        """Runs a step, waits for it, and returns its result and when each group did what."""
        result, future = self.submit(self._signature.bind(args, kwargs), profile=True)
        return result, tuple(event for reply in future.replies() for event in reply.events)

    def submit(self, call: Call, profile: bool = False) -> tuple[Any, StepFuture]:
        """Submits a step. Returns its result, and what the groups reply.

        Raises: ``ValueError`` for arguments that the step was not compiled for, ``RuntimeError`` when the
          mesh was closed since; while a result of a step on a cluster is alive, the replies raise it instead.
        """
        self._expected.check_serves(call)
        call.check_donations()
        runtime = self._runtime()
        if runtime is None:
            raise RuntimeError("the mesh was closed, and the step was unloaded; compile it again")
        runtime.check_process()
        runtime.in_flight.enter()
        try:
            result, future, replies = self._submit(call, runtime, profile)
        except BaseException:
            runtime.in_flight.leave()
            raise
        runtime.in_flight.leave_after(replies)
        return result, future

    def _submit(self, call: Call, runtime: Runtime, profile: bool) -> tuple[Any, StepFuture, list[Future]]:
        results = [runtime.next_handle() for _ in self.plan.outputs]
        with runtime.arguments.delivery(len(self.plan.programs)) as delivery:
            arguments = self._collect(call, runtime, delivery)
            step = runtime.next_handle()  # steps are submitted in ascending order
            requests = self._requests(step, arguments, results, delivery, profile)
            try:
                replies = runtime.submit_step(requests)
            except BaseException:  # also an interrupt: some of the groups may have got their request
                delivery.cancel()
                for leaf, handle in zip(self.plan.outputs, results, strict=True):
                    runtime.free(leaf.mpmd_idxs, handle)
                call.delete_donated()
                raise
            delivery.commit(replies.values())
        call.delete_donated()
        future = StepFuture(replies)
        return self._result(runtime, results, future), future, list(replies.values())

    def _result(self, runtime: Runtime, handles: Sequence[Handle], future: StepFuture) -> Any:
        submeshes = self._mesh.abstract_submeshes
        arrays = [
            MpmdArray(
                aval=aval,
                mpmd_idxs=leaf.mpmd_idxs,
                spec=leaf.spec or (),
                submesh=submeshes[leaf.mpmd_idxs[0]],
                runtime=runtime,
                handle=handle,
                future=future,
            )
            for aval, leaf, handle in zip(self._out_avals, self.plan.outputs, handles, strict=True)
        ]
        return jax.tree.unflatten(self._out_tree, arrays)

    def _collect(self, call: Call, runtime: Runtime, delivery: Delivery) -> dict[int, Handle]:
        """A handle for each argument leaf that is read; those that groups lack are added to the delivery."""
        handles: dict[int, Handle] = {}
        for i, (leaf, wanted) in enumerate(zip(call.leaves, self.plan.inputs, strict=True)):
            if wanted.name is None:
                continue
            if isinstance(leaf, MpmdArray) and leaf.is_on(runtime, wanted.mpmd_idxs):
                handles[i] = leaf.handle
                continue
            # Only an array that cannot change or be deleted is the same at the next call.
            array = leaf if isinstance(leaf, jax.Array) and not call.donated[i] else None
            handle = None if array is None else delivery.find(array, wanted.mpmd_idxs)
            if handle is None:
                value = host_value(leaf, call.avals[i], call.donated[i])
                handle = delivery.send(value, wanted.mpmd_idxs, array)
            handles[i] = handle
        return handles

    def _requests(
        self,
        step: int,
        arguments: dict[int, Handle],
        results: Sequence[Handle],
        delivery: Delivery,
        profile: bool,
    ) -> dict[int, StepRequest]:
        """What each group is asked."""
        return {
            group: StepRequest(
                program=self._loaded.number,
                step=step,
                inputs=tuple(arguments[i] for i in inputs),
                outputs=tuple(results[i] for i in outputs),
                host_arrays=delivery.host_arrays[group],
                transient=delivery.transient(group),
                profile=profile,
            )
            for group, (inputs, outputs) in enumerate(zip(self._inputs, self._outputs, strict=True))
        }


def _unload(runtime: weakref.ref[Runtime], program: int) -> None:
    if (running := runtime()) is not None:
        running.unload(program)


def explain(step: LoadedStep) -> Explanation:
    """Explains a step that ``mpmd_jit_with_loop(...).compile(...)`` returned.

    ``print(mpmd.explain(step))`` is an overview: where arguments and results are, what is sent, and what the
    tasks do. ``print(mpmd.explain(step).leaf("params['w']"))`` tells all about one of them.

    Raises: ``TypeError`` for anything but a compiled step.
    """
    if not isinstance(step, LoadedStep):
        raise TypeError(f"explain takes a compiled step, mpmd_jit_with_loop(...).compile(...), not {step!r}")
    compiled = step.compiled
    return explain_plan(step.plan, step.topology, compiled.program.jaxprs, compiled.traced.carried_state)


def _ints(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
