"""Hosts one group: its submesh, the values that live there between steps, and its programs."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpmd.errors import StepAborted, TaskError
from mpmd.ir.plan import Executable, Plan, Spec
from mpmd.program import Function, Program, Variant
from mpmd.runtime import requests as ask
from mpmd.runtime import storage
from mpmd.runtime.activity import FINISHING, Activity, Loading
from mpmd.runtime.collectives import ExecutableAnalysis
from mpmd.runtime.compiling import (
    Compile,
    CompiledAhead,
    Compiling,
    LoadReply,
    compile_executable,
    compile_with_open_specs,
    memory_of,
)
from mpmd.runtime.device_memory import memory_limit, memory_use
from mpmd.runtime.device_trace import ALL_GROUPS, DeviceTrace, process_name
from mpmd.runtime.digests import process_digests
from mpmd.runtime.executor import Executor
from mpmd.runtime.lost_values import DONATED_IN_PROCESS, LostValue, LostValueError
from mpmd.runtime.operations import StepState
from mpmd.runtime.recording import Recording
from mpmd.runtime.requests import (
    Captured,
    Handle,
    JsonSpec,
    Released,
    Request,
    StepReply,
    StepRequest,
    add_reply,
    operands_on_host,
    readable_operands,
)
from mpmd.runtime.task_keeper import TaskKeeper
from mpmd.runtime.transport import Transport
from mpmd.util.stopwatch import Stopwatch


class GroupWorker:
    """Hosts one group's programs and values. Not thread-safe: one caller at a time, steps in order.

    A group of several processes has a worker in each process. All workers get the same calls in the same
    order.

    Args:
      transport_of: returns the transport for a plan: this group's end of the edges to other groups.
      put: puts a host array that has come with a step on the devices, which may keep its memory.
      agree: is called with a step and why this process cannot run it, if so. Waits until all processes of the
        group have come to the step; raises ``StepAborted`` in all processes when one cannot run it.
      of_donated: the text in errors about values that a failed step has taken over.
      rank: the number of this process within the group.
      is_alone: whether no other group is in this process.
    """

    def __init__(
        self,
        mpmd_idx: int,
        submesh: jax.sharding.Mesh,
        transport_of: Callable[[Plan], Transport],
        put: Callable[[Any, jax.sharding.Sharding], jax.Array],
        agree: Callable[[int, str | None], None] = lambda step, reason: None,
        activity: Activity | None = None,
        of_donated: str = DONATED_IN_PROCESS,
        rank: int = 0,
        is_alone: bool = False,
    ):
        self.mpmd_idx = mpmd_idx
        self._of_donated = of_donated
        self._rank = rank
        self._is_alone = is_alone
        self._put = put
        self.submesh = submesh
        self._transport_of = transport_of
        self._agree = agree
        self._values: dict[Handle, jax.Array | LostValue] = {}
        self._received: set[Handle] = set()  # of these, and of some that are gone, those not computed here
        self._captured: dict[Handle, tuple[jax.Array, ...]] = {}  # operands and results of tasks
        self._copies: dict[Handle, dict[Handle, tuple[storage.HostShard, ...]]] = {}
        self._programs: dict[int, Executor] = {}
        self._ahead: dict[int, CompiledAhead] = {}
        self._trace = DeviceTrace()
        self.activity = activity or Activity()

    def compile(
        self,
        number: int,
        executable: Executable,
        function: Function,
        compile: Compile = compile_executable,
    ) -> tuple[Spec, ...]:
        """Compiles an executable of program ``number`` with ``compile``, and keeps it for ``load``.

        Returns: its output specs; the compiler has chosen the open ones.
        """
        ahead = self._ahead.setdefault(number, CompiledAhead())
        variant: Variant = (executable.name, executable.in_specs)  # type: ignore[assignment]
        compiling = self._compiling(executable, ahead.watch)
        ahead.calls[variant], chosen = compile_with_open_specs(
            executable, function, self.submesh, compiling, compile
        )
        return chosen

    def _compiling(self, executable: Executable, watch: Stopwatch) -> Compiling:
        @contextlib.contextmanager
        def compiling() -> Iterator[None]:
            with watch("xla"), self.activity.during(Loading(f"compiling {executable.name}")):
                yield

        return compiling

    def load(self, number: int, program: Program, compile: Compile = compile_executable) -> LoadReply:
        """Compiles this group's executables of a program with ``compile``, and keeps them under ``number``.

        Returns: the memory that XLA needs to run the program, and the seconds that XLA compiled, including
          in the method ``compile``.
        """
        ahead = self._ahead.pop(number, CompiledAhead())

        def compiled_call(executable: Executable) -> jax.stages.Compiled:
            if executable.name in program.compiled:
                return ahead.calls[program.compiled[executable.name]]
            compiling = self._compiling(executable, ahead.watch)
            return compile(executable, program.functions[executable.name], self.submesh, compiling)

        compiled = {e.name: compiled_call(e) for e in program.plan.executables_of(self.mpmd_idx)}
        self._programs[number] = Executor(
            plan=program.plan,
            mpmd_idx=self.mpmd_idx,
            submesh=self.submesh,
            executables=compiled,
            constants=program.constants,
            transport=self._transport_of(program.plan),
        )
        memory = {name: memory_of(call) for name, call in compiled.items()}
        return LoadReply(
            xla_seconds=ahead.watch.seconds.get("xla", 0.0),
            memory={name: needed for name, needed in memory.items() if needed},
            memory_limit=memory_limit(self.submesh.local_devices),
        )

    def answer(self, request: Request) -> Any:
        match request:
            case StepRequest():
                return self._run_step(request)
            case ask.Fetch(handle):
                return self._captured[handle] if handle in self._captured else self._value(handle)
            case ask.CopyOut(copy, handles):
                self._copies[copy] = {handle: storage.copied_out(self._value(handle)) for handle in handles}
            case ask.Write(copy, specs):
                return self._write(copy, specs[self._rank])
            case ask.Read(stored):
                self._values.update(storage.read(stored, self.submesh))
                return StepReply({})
            case ask.Release(released):
                self.release(released)
            case ask.Digests():
                devices = self.submesh.local_devices
                return process_digests(self.mpmd_idx, self._rank, devices, self._values, self._received)
            case ask.Analyses(program):
                return {
                    name: ExecutableAnalysis(call.as_text() or "", call.cost_analysis() or {})
                    for name, call in self._programs[program].executables.items()
                }
            case ask.MeasuredPeak():
                return memory_use(self.submesh.local_devices).device_peak
            case ask.StartTrace():
                self._trace.start()
            case ask.StopTrace():
                name = process_name(self.mpmd_idx, self._rank) if self._is_alone else ALL_GROUPS
                return {name: self._trace.stop()}
            case _:
                raise AssertionError(f"{request} is no request that groups know")
        return None

    def _run_step(self, request: StepRequest) -> StepReply:
        """Runs one step. When it fails, its outputs are lost, and reading them raises the reason."""
        program, capture = self._programs[request.program], request.capture
        synchronous = program.synchronous
        state = StepState(request.run, self.activity, request.refused)
        if request.profile:
            received = time.perf_counter_ns()
            state.recording = Recording(received, synchronous, self._is_alone and synchronous)
        if request.digests and synchronous:  # other devices compute while the host goes on: it would wait
            state.digests = []
        if capture is not None:
            state.keeper = TaskKeeper(capture, request.refused is not None)
        host_arrays = dict(request.host_arrays)
        request.host_arrays.clear()  # because whoever has sent the request refers to it as well
        self.release(request.released)
        with (
            jax.enable_x64(program.enable_x64),
            jax.debug_nans(False),  # by which JAX would look at all that a task makes
            jax.debug_infs(False),
            self.activity.during("preparing", request.step),
        ):
            try:
                inputs = self._take_inputs(program, request, host_arrays)
                if state.recording is not None:
                    state.recording.mark_ready(inputs)
                outputs = program.execute(state, inputs)
                if state.recording is not None:
                    state.recording.finished = time.perf_counter_ns()
                self.activity.now = (FINISHING, time.perf_counter())
                inline = {request.outputs[i]: np.asarray(outputs[i]) for i in program.inline}
                on_host = tuple(map(operands_on_host, state.callback_operands))
            except Exception as error:
                has_kept = isinstance(error, TaskError) or (capture is not None and capture.task is not None)
                captured = self._keep(state.keeper) if has_kept else None
                operands = tuple(readable_operands(state.callback_operands))
                add_reply(error, StepReply({}, callback_operands=operands, captured=captured))
                lost = LostValue(self._reason(error, request))
                missing = [handle for handle in host_arrays if handle not in self._values]
                self._values.update(dict.fromkeys([*missing, *request.outputs], lost))
                raise
            finally:
                for handle in request.transient:
                    self._values.pop(handle, None)
        self._values.update(zip(request.outputs, outputs, strict=True))
        self._received.update(request.outputs[i] for i in program.received)
        times = () if state.recording is None else (state.recording.times(self.mpmd_idx, self._rank),)
        memory = memory_use(self.submesh.local_devices) if request.measure_memory else None
        messages = {} if state.digests is None else {self._rank: tuple(state.digests)}
        captured = self._keep(state.keeper) if capture is not None and capture.task is not None else None
        return StepReply(inline, times, on_host, memory, messages, captured)

    def _keep(self, keeper: TaskKeeper | None) -> Captured | None:
        kept = None if keeper is None else keeper.kept(self.mpmd_idx, self.submesh.devices.flat[0])
        if kept is None:
            return None
        captured, self._captured[captured.capture.handle] = kept
        return captured

    def _reason(self, error: Exception, request: StepRequest) -> str:
        if isinstance(error, LostValueError):
            return error.reason
        return f"{error}. {self._of_donated}" if request.donated else str(error)

    def _take_inputs(
        self,
        program: Executor,
        request: StepRequest,
        host_arrays: dict[Handle, Any],
    ) -> list[jax.Array]:
        for handle, sharding in zip(request.inputs, program.input_shardings, strict=True):
            if handle in host_arrays:
                self._values[handle] = self._put(host_arrays[handle], sharding)
                self._received.add(handle)
                del host_arrays[handle]
        inputs = self._agreed_inputs(request)
        holders = collections.Counter(map(id, self._values.values())) if any(program.donated) else {}
        for i, (value, sharding) in enumerate(zip(inputs, program.input_shardings, strict=True)):
            if value.sharding != sharding:
                inputs[i] = jax.device_put(value, sharding)
            if program.donated[i]:
                if holders[id(value)] > 1:
                    # Another result is the same array, or shares its buffer, and it must survive.
                    inputs[i] = jax.device_put(inputs[i], sharding, may_alias=False)  # compiles nothing
                del self._values[request.inputs[i]]
        return inputs

    def _agreed_inputs(self, request: StepRequest) -> list[jax.Array]:
        """The step's inputs, when all processes of the group have theirs: collectives follow."""
        inputs, missing = [], None
        try:
            if request.failed is not None:
                raise LostValueError(request.failed)
            inputs = [self._value(handle) for handle in request.inputs]
        except RuntimeError as error:
            missing = error
        try:
            self._agree(request.run, None if missing is None else str(missing))
        except StepAborted:
            if missing is None:
                raise
        if missing is not None:
            raise missing
        return inputs

    def _value(self, handle: Handle) -> jax.Array:
        value = self._values.get(handle)
        if value is None:
            raise RuntimeError("the group does not have this value: it was freed, or it never arrived")
        if isinstance(value, LostValue):
            raise LostValueError(value.reason)
        return value

    def _write(self, copy: Handle, specs: Sequence[tuple[Handle, JsonSpec]]) -> int:
        """Writes this process's shards of copied values, drops the copy, and returns the number of bytes.

        May run in another thread, while steps run.

        Raises: as ``storage.write``; ``RuntimeError`` when the copy was dropped.
        """
        copies = self._copies.pop(copy, None)
        if copies is None:
            raise RuntimeError("the copy is gone: its process was replaced since, or the mesh was closed")
        return storage.write(copies, specs)

    def values(self) -> dict[Handle, jax.Array | LostValue]:
        return dict(self._values)

    def replace_values(self, values: Mapping[Handle, jax.Array | LostValue]) -> None:
        self._values = dict(values)

    def release(self, released: Released) -> None:
        """Ignores handles of donated values, and programs that were not loaded."""
        for handle in released.handles:
            self._values.pop(handle, None)
            self._captured.pop(handle, None)
            self._copies.pop(handle, None)
        self._received.intersection_update(self._values)
        for number in released.programs:
            self._programs.pop(number, None)
            self._ahead.pop(number, None)

    def keep_only(self, programs: Collection[int]) -> None:
        """Drops every program that is not in ``programs``, also programs that are compiled in part."""
        self.release(Released(programs=tuple((self._programs.keys() | self._ahead.keys()) - set(programs))))

    def close(self) -> None:
        self._values.clear()
        self._captured.clear()
        self._copies.clear()
        self._programs.clear()
        self._ahead.clear()
