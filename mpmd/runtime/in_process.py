"""All groups in this process: a thread for each, over this process's devices."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import numpy as np

from mpmd.compat import trace_context_for_threads
from mpmd.errors import MESH_CLOSED, StepAborted
from mpmd.ir.participants import participants
from mpmd.ir.plan import Executable, Spec
from mpmd.ir.specs import fitting
from mpmd.program import Function, Program
from mpmd.runtime.compile_once import compile_for
from mpmd.runtime.executor import put
from mpmd.runtime.inbox import ArrayArrival, Inbox
from mpmd.runtime.protocol import LoadedProgram, Runtime
from mpmd.runtime.requests import Release, Released, Request, StepReply, StepRequest
from mpmd.runtime.resolve_specs import resolve_specs
from mpmd.runtime.transport import Array, MessageId, Transport
from mpmd.runtime.worker import GroupWorker
from mpmd.sharding import spec_of, to_sharding
from mpmd.util.stopwatch import Stopwatch

_CLOSED = f"{MESH_CLOSED}, and the values on it are gone"


class InProcessTransport:
    """Hands arrays over: in the host's memory if the receiver computes there, else on the receiver's devices.

    Either way the sender may donate its array afterwards: JAX copies an array that numpy has a view of.
    """

    def __init__(self, inboxes: Sequence[Inbox], submeshes: Sequence[jax.sharding.Mesh], mpmd_idx: int):
        self._inboxes = inboxes
        self._submeshes = submeshes
        self._mpmd_idx = mpmd_idx
        self._in_host_memory = [submesh.devices.flat[0].platform == "cpu" for submesh in submeshes]

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        if self._in_host_memory[message.dst]:
            handed: Sequence[Array] = [np.asarray(array) for array in arrays]
        else:
            here, there = self._submeshes[self._mpmd_idx], self._submeshes[message.dst]
            handed = jax.device_put(list(arrays), [_moved(array, here, there) for array in arrays])
        inbox = self._inboxes[message.dst]
        inbox.add(message, ArrayArrival(handed))
        inbox.wake()

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        arrays = self._inboxes[self._mpmd_idx].take(message).open(shardings)
        return (
            arrays if self._in_host_memory[self._mpmd_idx] else jax.device_put(list(arrays), list(shardings))
        )

    @property
    def arrived(self) -> int:
        return self._inboxes[self._mpmd_idx].arrived


def _moved(array: Array, here: jax.sharding.Mesh, there: jax.sharding.Mesh) -> jax.sharding.Sharding:
    spec = () if isinstance(array, np.ndarray) else spec_of(array.sharding, here, array.ndim)
    return to_sharding(fitting(spec, array.shape, there.shape), there)


_Call = tuple[Callable[[], Any], Callable[[], AbstractContextManager], Future]


class _GroupThread:
    def __init__(self, worker: GroupWorker):
        self.worker = worker
        self._closed = False
        self._ended = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        name = f"mpmd group {worker.mpmd_idx}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> Future:
        """Raises ``RuntimeError`` when the thread was closed."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        future: Future = Future()
        self._calls.put((call, trace_context_for_threads(), future))
        if self._ended:  # perhaps too late for the thread to see the call
            self._fail_rest()
        return future

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, context, future = item
            # An idle thread must not keep the last call's arrays, nor have them when its end is seen.
            try:
                with context():
                    result = call()
            except BaseException as error:  # all errors are for the thread that waits for the call
                del item, call, context
                future.set_exception(error)
            else:
                del item, call, context
                future.set_result(result)
                del result
            del future
        self._ended = True
        self._fail_rest()
        self.worker.close()

    def _fail_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (item := self._calls.get_nowait()) is not None:
                    item[-1].set_exception(RuntimeError(_CLOSED))

    @property
    def pending(self) -> int:
        return self._calls.qsize()

    def end(self) -> None:
        """Ends the thread, and frees the group's values, after the calls already made. Does not wait."""
        self._closed = True
        self._calls.put(None)

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _close_all(groups: Sequence[_GroupThread]) -> None:
    for group in groups:
        group.end()
    for group in groups:
        group.join()


class InProcessRuntime(Runtime):
    def __init__(self, submeshes: Sequence[jax.sharding.Mesh], max_in_flight: int):
        super().__init__([1] * len(submeshes), max_in_flight)
        self._submitting = threading.Lock()  # a step is submitted to all groups or to none
        self.traced_groups = (0,)
        self._inboxes = [Inbox() for _ in submeshes]
        self._groups = [
            _GroupThread(_worker(i, submesh, InProcessTransport(self._inboxes, submeshes, i)))
            for i, submesh in enumerate(submeshes)
        ]
        self._writers = ThreadPoolExecutor(len(submeshes), "mpmd writer")  # which starts threads when needed
        # Also at exit: if a thread is still inside XLA when the interpreter exits, the process crashes.
        self._close = weakref.finalize(self, _close_all, tuple(self._groups))

    def load(self, program: Program) -> LoadedProgram:
        self.check_process()
        number = next(self._programs)
        self._participants[number] = participants(program.plan)
        watch = Stopwatch()
        compile_shared = compile_for(program, [group.worker.submesh for group in self._groups])

        def compile(mpmd_idx: int, executable: Executable, function: Function) -> Future[tuple[Spec, ...]]:
            group = self._groups[mpmd_idx]
            return group.submit(partial(group.worker.compile, number, executable, function, compile_shared))

        try:
            with watch("resolve"):
                program = resolve_specs(program, compile)
            with watch("load"):
                loading = {
                    i: self._groups[i].submit(
                        partial(self._groups[i].worker.load, number, program, compile_shared)
                    )
                    for i in self._participants[number]
                }
                replies = {i: future.result() for i, future in loading.items()}
        except BaseException:  # also an interrupt
            self.unload(number)
            raise
        return LoadedProgram(number, program.without_functions(), watch.seconds, replies, {})

    def unload(self, number: int) -> None:
        released = Release(Released(programs=(number,)))
        for mpmd_idx in self._participants.pop(number, ()):
            with contextlib.suppress(RuntimeError):  # the mesh was closed
                self._ask_group(mpmd_idx, released)

    def _ask_group(self, mpmd_idx: int, request: Request) -> Future:
        group = self._groups[mpmd_idx]
        answer = partial(_answer, group.worker, request)
        match request.beside_steps:
            case "control":
                future: Future = Future()
                future.set_result(answer())
                return future
            case "storage":
                if self.is_closed:
                    raise RuntimeError(_CLOSED)
                return self._writers.submit(answer)
        return group.submit(answer)

    def _submit_step(self, requests: Mapping[int, StepRequest]) -> dict[int, Future]:
        futures = {}
        with self._submitting:
            run = next(self._runs)
            abort = partial(self._abort, tuple(requests), run)
            try:
                self._tell_released(but=requests)
                for mpmd_idx, request in requests.items():
                    request = dataclasses.replace(request, released=self._released.take(mpmd_idx), run=run)
                    call = partial(self._run_step, mpmd_idx, request, abort)
                    futures[mpmd_idx] = self._groups[mpmd_idx].submit(call)
            except BaseException:  # also an interrupt: the groups that have the step must not wait for others
                abort("the step did not reach all groups")
                raise
        return futures

    def _run_step(self, mpmd_idx: int, request: StepRequest, abort: Callable[[str], None]) -> StepReply:
        self._inboxes[mpmd_idx].begin_step(request.run)
        try:
            return self._groups[mpmd_idx].worker.answer(request)
        except StepAborted:
            raise
        except Exception as error:
            abort(str(error))
            raise

    def _abort(self, mpmd_idxs: Sequence[int], step: int, reason: str) -> None:
        for mpmd_idx in mpmd_idxs:
            self._inboxes[mpmd_idx].abort(step, reason)

    def status(self) -> tuple[tuple[str, int], ...]:
        return tuple((str(group.worker.activity.read()), group.pending) for group in self._groups)

    def close(self) -> None:
        """Ends the threads after the steps already submitted, and waits for them, their callbacks and writes.

        Does nothing in a fork.
        """
        if os.getpid() != self._process:
            return
        self.is_closed = True
        with self._submitting:
            for group in self._groups:
                group.end()
        self._writers.shutdown()
        self._close()
        self.callbacks.wait()


def _worker(mpmd_idx: int, submesh: jax.sharding.Mesh, transport: Transport) -> GroupWorker:
    return GroupWorker(mpmd_idx, submesh, lambda plan: transport, _put)


def _answer(worker: GroupWorker, request: Request) -> Any:
    return request.join([worker.answer(request)])


def _put(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array on the devices: a copy of a view, which would keep the caller's array alive."""
    return put(array if array.flags.owndata else array.copy(), sharding)
