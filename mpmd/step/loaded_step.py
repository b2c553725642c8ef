"""A step that the groups have compiled: its plan, its runs, and the state that it makes for itself."""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import jax

from mpmd.arguments.call import Call, check_argnum
from mpmd.arguments.leaves import ArgumentLeaf, placement_of
from mpmd.arguments.signature import CallSignature
from mpmd.capture import CaptureWriter
from mpmd.compat import api_boundary
from mpmd.compiler.pipeline import CompiledStep
from mpmd.errors import MESH_CLOSED
from mpmd.explanation import Report, sources_of, warn_of_undonated_state
from mpmd.ir.participants import participants
from mpmd.ir.plan import Plan
from mpmd.ir.routes import bytes_per_step
from mpmd.meshes.group_mesh import GroupMesh
from mpmd.profile.profile import Profile
from mpmd.runtime.collectives import Collective, ExecutableAnalysis, collectives_in
from mpmd.runtime.device_times import with_device_times
from mpmd.runtime.interrupts import DeferredInterrupt
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.requests import Analyses, Capture, Handle, StepReply
from mpmd.runtime.step_future import StepFuture
from mpmd.runtime.step_meter import StepMeter
from mpmd.runtime.survey import measured_peaks
from mpmd.step.capturing import check_capture, failure_capture, failures_captured, write_named
from mpmd.step.initialize import compile_init
from mpmd.step.memory_stats import memory_stats
from mpmd.step.part_numbers import check_in_part, loaded_in, peaks_in, program_of_whole, times_in
from mpmd.step.planned_step import PlannedStep, explain
from mpmd.step.record_steps import check_names, check_repeatable, record_steps
from mpmd.step.step_requests import StepRequests
from mpmd.step.step_results import StepResults, hand_back
from mpmd.step.traced import traced
from mpmd.util.stopwatch import Stopwatch
from mpmd.validation import callable_fault, int_fault, raise_faults
from mpmd.verify import verify


class LoadedStep(PlannedStep):
    """A step compiled for arguments of certain shapes and dtypes, and loaded by the groups.

    Called like the function it was made from, with arguments of just these shapes and dtypes. When it is
    dropped, the groups drop the step's executables.

    Args:
      meter: counts all steps of the function, for any shapes.
    """

    def __init__(
        self, compiled: CompiledStep, call: Call, mesh: GroupMesh, signature: CallSignature, meter: StepMeter
    ):
        # Groups have the functions, and a program may hold many steps. The mesh runs as long as it is held.
        of_plan = dataclasses.replace(compiled, program=compiled.program.without_functions())
        super().__init__(of_plan, call, mesh, signature)
        self.meter = meter
        self._argument_leaves = compiled.step.argument_leaves
        runtime = mesh.runtime
        self._runtime = weakref.ref(runtime)  # which the mesh keeps until it is closed
        self._loaded = runtime.load(program_of_whole(compiled.program, mesh))
        runtime.meters.add(meter)
        self._writer = CaptureWriter(self._loaded.program, mesh.whole.abstract_submeshes)
        runtime.captures.add(self._loaded.number, self._writer)
        weakref.finalize(self, _unload, self._runtime, self._loaded.number).atexit = False
        self._in_part = loaded = loaded_in(self._loaded, mesh)
        resolved = loaded.program.plan
        watch = Stopwatch({**compiled.seconds, **loaded.seconds})
        with watch("verify"):
            self._verified = compiled.verified if resolved is compiled.program.plan else verify(resolved)
        self._seconds = watch.seconds
        self._plan = plan = loaded.plan
        self._sent_bytes = functools.cache(functools.partial(bytes_per_step, plan, mesh.topology))
        state = compiled.step.fed_back
        limits = {group: reply.memory_limit for group, reply in loaded.replies.items()}
        warn_of_undonated_state(plan, state, self._verified.memory, limits)
        self._mesh_plan = asked = self._loaded.plan
        self._groups = participants(asked)  # the step does not fail when another one is gone
        self._requests = StepRequests(self._loaded, self._argument_leaves, self._groups)
        self._fed_back = dict(compiled.step.fed_back_leaves)
        self._results = StepResults(compiled.step, asked.outputs, mesh.whole.abstract_submeshes)
        self._profiled: Profile | None = None  # without its result
        # The compiled steps of ``init``, by its function, which the user may drop.
        self._inits: weakref.WeakKeyDictionary[Callable, dict] = weakref.WeakKeyDictionary()

    @property
    def plan(self) -> Plan:
        """The verified programs of all groups, with the memory that XLA needs to run them; printable."""
        return self._plan

    def report(self) -> Report:
        """The tasks and the needs of each group, and the seconds of compiling; printable.

        It asks the allocators of the groups' devices for their peaks so far; allocators of CPUs do not count
        peaks. Once the step was profiled, it also has the findings of the last profile.
        """
        runtime = self._runtime()
        return self._report(
            verified=self._verified,
            seconds=self._seconds,
            xla_seconds={group: reply.xla_seconds for group, reply in self._in_part.replies.items()},
            holdings=self._in_part.holdings,
            measured_peaks=peaks_in(self.mesh, measured_peaks(runtime)) if runtime else None,
            profile=self._profiled,
        )

    @api_boundary
    def argument_leaves(self, argnum: int | str = 0) -> Any:
        """The leaves of an argument with their placements: its pytree, with an ``ArgumentLeaf`` for each.

        Args:
          argnum: the argument's position, or its name.

        Raises: ``ValueError`` when the step was compiled for no such argument, or for a static one.
        """
        inputs, first = iter(self._mesh_plan.inputs), self._groups[0]
        leaves = [
            ArgumentLeaf(leaf.path, aval, placement_of(leaf.stack, [next(inputs) for _ in leaf.names], first))
            for leaf, aval in zip(self._argument_leaves, self._call.avals, strict=True)
        ]
        return self._call.argument(argnum, self.signature.names, leaves)

    @api_boundary
    def init(self, fun: Callable, *args: Any, argnum: int | str = 0) -> Any:
        """Makes an argument of the step, such as its state, on the groups that read it: ``fun(*args)``.

        Each group computes the leaves that it reads, sharded as it reads them. No process has the whole
        argument, and the driver holds no part. The values equal ``jax.jit(fun)(*args)``; random numbers do,
        too, if they do not depend on their sharding, as with JAX's default keys. The same function is not
        compiled again for arguments of the same shapes and dtypes.

        Args:
          fun: makes a pytree like the argument.
          args: pytrees of arrays, such as a key.
          argnum: the argument's position in the step's call, or its name.

        Returns: the argument, of ``MpmdArray``s. Nothing waits until it is made.
        Raises: ``CompileError`` naming the leaves that have another shape or dtype than the step reads, or
          that are missing in one of the two; ``ValueError`` as ``argument_leaves``; ``RuntimeError`` when the
          mesh was closed since.
        """
        raise_faults(callable_fault("fun", fun))
        check_argnum(argnum)
        runtime = self._running()
        signature = CallSignature.of(fun)
        call = signature.bind(args, {})
        enable_x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        key = (argnum, call.key, call.placements(runtime), enable_x64)
        known = self._inits.setdefault(fun, {})
        if key not in known:
            mesh = self.mesh.whole  # of which any group may have the function's arguments
            compiled = compile_init(fun, call, self.argument_leaves(argnum), mesh)
            meter = StepMeter.of(fun, mesh)
            known[key] = LoadedStep(compiled, call.described_by(call.avals), mesh, signature, meter)
        return known[key].submit(call)[0]

    @api_boundary
    def restore(self, path: str | os.PathLike, argnum: int | str = 0) -> Any:
        """Restores an argument, such as the state, from a checkpoint, to the groups that read it.

        The checkpoint may be of any groups, stages and shardings, or of plain JAX. Waits until all groups
        have read. ``mpmd.restore`` restores other pytrees, of which ``argument_leaves`` is a part.

        Args:
          path: the directory of a checkpoint of ``mpmd.save`` or of Orbax.
          argnum: the argument's position, or its name.

        Raises: as ``mpmd.restore`` and ``argument_leaves``; ``RuntimeError`` when the mesh was closed since.
        """
        from mpmd.checkpoint import restore  # which imports Orbax, an optional package

        self._running()
        return restore(path, self.argument_leaves(argnum), self.mesh)

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.submit(self.signature.bind(args, kwargs))[0]

    @api_boundary
    def profile(
        self, *args: Any, steps: int = 1, trace_dir: str | os.PathLike | None = None, **kwargs: Any
    ) -> Profile:
        """Runs steps, waits for each, and returns the last result with the times of all processes.

        ``result, events = step.profile(...)`` has the result and the events of the last step. Each task is
        waited for while a step is recorded, which an accelerator's queue of tasks would otherwise hide. A
        step that groups ran again, since a group recovered, counts only if there is no other.

        Args:
          args, kwargs: the step's arguments; the first step's, if there are several.
          steps: the number of steps. Each takes the state that the step before has returned. Medians of tasks
            that run once a step, such as the optimizer's, need several.
          trace_dir: a directory of the driver's machine to which ``jax.profiler``'s traces of all processes
            of all groups are brought; the traces have the names of tasks. XProf and TensorBoard open the
            directory, and Perfetto the files that end in ``trace.json.gz``; ``mpmd.collective_seconds`` reads
            it. A step that fails leaves the traces until then. Traces that are lost, as where a group dies
            and recovers meanwhile, are a ``RuntimeWarning``: the result may be the only copy of the state. On
            accelerators the times of tasks are then measured on the devices.

        Raises: ``ValueError`` when ``trace_dir`` cannot be written, for less than one step, and for several
          steps with a donated argument that no result replaces; ``TypeError`` when ``trace_dir`` is no path;
          all before anything runs; ``RuntimeError`` when a process is being traced already; and as a call.
        """
        call = self.signature.bind(args, kwargs)
        raise_faults(int_fault("steps", steps), title="step.profile: ")
        is_traced = trace_dir is not None
        check_names("profile", self.signature.names, args, steps=steps != 1, trace_dir=is_traced)
        self._call.check_serves(call)
        if steps > 1:
            check_repeatable(call, self._fed_back)
        state = (self.plan.inputs[i].name for i, _ in self.compiled.step.fed_back)
        unrecorded = Profile(  # made before anything runs: what fails later may cost the state
            plan=self.plan,
            topology=self.topology,
            recorded=(),
            sources=sources_of(explain(self).tasks),
            compile_seconds=self._seconds,
            updated=frozenset(name for name in state if name),
        )
        runtime, submit = self._running(), functools.partial(self.submit, profile=True)
        with traced(runtime, trace_dir) as traces:
            result, recorded = record_steps(runtime, submit, call, self._fed_back, steps)
        recorded = times_in(self.mesh, with_device_times(recorded, traces))
        profile = dataclasses.replace(unrecorded, recorded=recorded, result=result)
        self._profiled = profile.without_result()
        return profile

    @api_boundary
    def capture(
        self, *args: Any, task: str, to: str | os.PathLike, mpmd_idx: int | None = None, **kwargs: Any
    ) -> Any:
        """Runs a step, and writes one of its tasks to a directory, which ``mpmd replay`` runs again alone.

        The directory has the task's operands, and nobody but its user may read it; see :doc:`/replay`.

        Args:
          args, kwargs: the step's arguments.
          task: its name in the plan, such as ``fwd_2__5``: stage 2, microbatch 5.
          to: a directory that does not exist, or is empty.
          mpmd_idx: the group, for a task that several groups run; by default the first.

        Returns: the step's result. If the task cannot be written, that is a ``RuntimeWarning``: the result
          may be the only copy of the state.
        Raises: ``ValueError`` for a task that the step does not have, and a directory with content;
          ``TypeError`` for other types; both before anything runs; and as a call, after the task was written
          if it has begun.
        """
        group = check_capture(self._mesh_plan, task, to, mpmd_idx)
        is_named = mpmd_idx is not None
        check_names("capture", self.signature.names, args, task=True, to=True, mpmd_idx=is_named)
        call, runtime = self.signature.bind(args, kwargs), self._running()
        capture = Capture(task, runtime.next_handle())
        result, future = self.submit(call, captures={group: capture})
        try:
            write_named(runtime, self._writer, group, future, to)
        except KeyboardInterrupt:  # the caller has the donated arrays alone
            hand_back(call, jax.tree.leaves(result), self._fed_back)
            raise
        return result

    def _running(self) -> Runtime:
        runtime = self._runtime()
        if runtime is None or runtime.is_closed:
            raise RuntimeError(f"{MESH_CLOSED}, and the step was unloaded; compile it again")
        return runtime

    def collectives(self) -> dict[str, tuple[Collective, ...]]:
        """The exchanges among the devices of a group, in each executable of the plan, by its name.

        They are read from the code that XLA has compiled on the groups.
        """
        return {name: collectives_in(analysis.text) for name, analysis in self._analyses().items()}

    def memory_analysis(self) -> SimpleNamespace:
        """The fields of JAX's ``CompiledMemoryStats``, for each device of the group that needs the most.

        ``temp_size_in_bytes`` is all but arguments and results at the worst moment: activations,
        accumulators, messages, and XLA's temporaries. ``report()`` has the memory of all groups.
        """
        return memory_stats(self.plan, self.report())

    def _analyses(self) -> dict[str, ExecutableAnalysis]:
        runtime, analyses = self._running(), Analyses(self._loaded.number)
        answers = runtime.ask(dict.fromkeys(self._groups, analyses)).values()
        return {name: analysis for answer in answers for name, analysis in answer.result().items()}

    def submit(
        self, call: Call, profile: bool = False, captures: Mapping[int, Capture] | None = None
    ) -> tuple[Any, StepFuture]:
        """Submits a step. Returns its result, and the future of the groups' replies.

        ``captures`` are the tasks that groups are to keep.

        Raises: ``ValueError`` for arguments that the step was not compiled for, ``RuntimeError`` within a
          callback of a step, and when the mesh was closed since; the exception of ``write`` of
          ``mpmd.metrics``.
        """
        self.meter.check()
        self._call.check_serves(call)
        call.check_donations()
        runtime = self._running()
        runtime.check_process()
        if runtime.callbacks.is_current():
            raise RuntimeError(
                "a callback of a step cannot run a step, which may have to wait for the callback; have it "
                "note what is to be done, and do that after the step"
            )
        if not self.compiled.step.loops:
            call.check_held(runtime)
        check_in_part(self.mesh, call, runtime)
        runtime.in_flight.enter(self.mesh.part_name)
        submitted: list[tuple[Any, StepFuture]] = []
        try:
            self._submit(call, runtime, profile, captures, submitted)
            call.delete_donated_by_host()  # a caller who is interrupted before has them still
            self.meter.hand_over()
        except BaseException as interrupt:
            if not submitted:
                runtime.in_flight.leave(self.mesh.part_name)
                raise
            with DeferredInterrupt():
                is_handed_back = hand_back(call, jax.tree.leaves(submitted[0][0]), self._fed_back)
            if is_handed_back:
                interrupt.add_note(
                    "mpmd: the step that was being called will end. The state that was donated to it by "
                    "groups' arrays is now what it returns; its other results are lost"
                )
            raise
        return submitted[0]

    def _submit(
        self,
        call: Call,
        runtime: Runtime,
        profile: bool,
        captures: Mapping[int, Capture] | None,
        submitted: list[tuple[Any, StepFuture]],
    ) -> None:
        """Appends the step's result and future once all groups have it; until then an interrupt waits."""
        runtime.wait_to_submit(self._groups)
        results = [runtime.next_handle() for _ in self.plan.outputs]
        with runtime.arguments.delivery(self._groups) as delivery:
            measure_memory = self.meter.asks_for_memory()
            captures = failures_captured(runtime, self._groups) | dict(captures or {})
            requests = self._requests.of_step(
                call, runtime, delivery, results, profile, measure_memory, captures
            )
            with DeferredInterrupt():
                try:
                    replies = runtime.ask(requests)
                except BaseException:  # also a second interrupt: some groups may have got their request
                    delivery.cancel()
                    for leaf, handle in zip(self._mesh_plan.outputs, results, strict=True):
                        runtime.free(leaf.mpmd_idxs, handle)
                    call.delete_donated()
                    raise
                delivery.commit(replies.values())
                if measure_memory:
                    self.meter.read_memory(replies)
                submitted.append(self._submitted(call, runtime, results, replies))

    def _submitted(
        self,
        call: Call,
        runtime: Runtime,
        handles: Sequence[Handle],
        replies: Mapping[int, Future[StepReply]],
    ) -> tuple[Any, StepFuture]:
        ends: list[Future] = list(replies.values())
        called = None
        if callbacks := self._loaded.program.callbacks:
            called = runtime.callbacks.call_after(replies.values(), callbacks, self.plan, self.mesh.part_name)
            ends.append(called)
        captured = failure_capture(runtime, self._writer, replies)
        future = StepFuture(replies, called, runtime.callbacks, captured)
        call.donate_to(future)
        result = self._results.of_step(runtime, handles, future)
        on_end = self.meter.begin(self._sent_bytes)
        runtime.in_flight.leave_after(ends, on_end, self.mesh.part_name)
        return result, future


def _unload(runtime: weakref.ref[Runtime], program: int) -> None:
    if (running := runtime()) is not None:
        running.unload(program)
