"""All groups in this process: a thread for each, over this process's devices."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import numpy as np

from mpmd.errors import StepAborted
from mpmd.ir import Executable
from mpmd.program import Function, Program
from mpmd.runtime.mailbox import Mailbox
from mpmd.runtime.resolve import resolve_specs
from mpmd.runtime.runtime import HandleLedger, Loaded
from mpmd.runtime.sent import SentArrays
from mpmd.runtime.transport import Array, MessageId
from mpmd.runtime.worker import GroupWorker, Handle, StepReply, StepRequest
from mpmd.sharding import spec_of, to_sharding
from mpmd.timing import Stopwatch


class InProcessTransport:
    """Hands arrays over: those in the host's memory as they are, others copied to the receiver's devices.

    Either way the sender may donate its array afterwards: JAX copies an array that numpy has a view of.
    """

    def __init__(self, mailboxes: Sequence[Mailbox], submeshes: Sequence[jax.sharding.Mesh], mpmd_idx: int):
        self._mailboxes = mailboxes
        self._submeshes = submeshes
        self._mine = mailboxes[mpmd_idx]
        self._in_host_memory = submeshes[mpmd_idx].devices.flat[0].platform == "cpu"

    def send(self, message: MessageId, arrays: Sequence[Array]) -> None:
        if self._in_host_memory:
            handed: Sequence[Array] = [np.asarray(array) for array in arrays]
        else:
            there = self._submeshes[message.dst]
            handed = jax.device_put(list(arrays), [_moved(array, there) for array in arrays])
        self._mailboxes[message.dst].deliver(message, handed)

    def recv(self, message: MessageId, shardings: Sequence[jax.sharding.Sharding]) -> Sequence[Array]:
        arrays = self._mine.take(message)
        return arrays if self._in_host_memory else jax.device_put(list(arrays), list(shardings))

    def abort(self, step: int, reason: str) -> None:
        self._mine.abort(step, reason)

    def close(self) -> None:
        pass


def _moved(array: Array, submesh: jax.sharding.Mesh) -> jax.sharding.Sharding:
    """The sharding over another submesh that an array has over its own."""
    spec = () if isinstance(array, np.ndarray) else spec_of(array.sharding, submesh, array.ndim)
    return to_sharding(spec, submesh)


class _GroupThread:
    """Carries out calls on one worker, in order, in a thread of its own."""

    def __init__(self, worker: GroupWorker):
        self.worker = worker
        self._closed = False
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], bool, Future] | None] = queue.SimpleQueue()
        name = f"mpmd group {worker.mpmd_idx}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> Future:
        """Raises ``RuntimeError`` when the thread was closed."""
        if self._closed:
            raise RuntimeError("the mesh was closed, and the values on it are gone")
        future: Future = Future()
        # The setting may be a context of the caller's thread.
        self._calls.put((call, jax.config.jax_enable_x64, future))  # type: ignore[attr-defined]
        return future

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, enable_x64, future = item
            try:
                with jax.enable_x64(enable_x64):
                    future.set_result(call())
            except BaseException as error:  # whatever it is, it belongs to whoever waits for the call
                future.set_exception(error)
            del item, call, future  # an idle thread must not keep the last call's arrays alive

    def end(self) -> None:
        """Ends the thread after the calls already made; does not wait for it."""
        self._closed = True
        self._calls.put(None)

    def join(self) -> None:
        """Waits for the end, unless this is the thread itself."""
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _close_all(groups: Sequence[_GroupThread]) -> None:
    for group in groups:
        group.end()
    for group in groups:
        group.join()


class InProcessRuntime:
    """Implements ``mpmd.runtime.runtime.Runtime`` with threads."""

    def __init__(self, submeshes: Sequence[jax.sharding.Mesh]):
        self._mailboxes = [Mailbox() for _ in submeshes]
        self._groups = [
            _GroupThread(GroupWorker(i, submesh, InProcessTransport(self._mailboxes, submeshes, i)))
            for i, submesh in enumerate(submeshes)
        ]
        self._ledger = HandleLedger(len(submeshes))
        self.sent = SentArrays(self._ledger.drop)
        self._programs = itertools.count()
        self._submitting = threading.Lock()
        # Also at exit: a thread that the interpreter's end catches within XLA would take the process down.
        self._close = weakref.finalize(self, _close_all, tuple(self._groups))

    def load(self, program: Program) -> Loaded:
        number = next(self._programs)
        watch = Stopwatch()

        def output_specs(mpmd_idx: int, executable: Executable, function: Function):
            group = self._groups[mpmd_idx]
            return group.submit(partial(group.worker.output_specs, executable, function)).result()

        with watch("resolve"):
            program = resolve_specs(program, output_specs)
        arguments = (number, program.plan, program.functions, program.constants)
        with watch("load"):
            loading = [group.submit(partial(group.worker.load, *arguments)) for group in self._groups]
            xla_seconds = tuple(future.result() for future in loading)
        return Loaded(number, program, watch.seconds, xla_seconds)

    def submit(self, requests: dict[int, StepRequest]) -> dict[int, Future[StepReply]]:
        futures = {}
        with self._submitting:  # all groups must see the steps in the same order
            for mpmd_idx, request in requests.items():
                request = dataclasses.replace(request, frees=self._ledger.take_dropped(mpmd_idx))
                futures[mpmd_idx] = self._groups[mpmd_idx].submit(partial(self._step, mpmd_idx, request))
        return futures

    def _step(self, mpmd_idx: int, request: StepRequest) -> StepReply:
        try:
            return self._groups[mpmd_idx].worker.step(request)
        except StepAborted:
            raise
        except Exception as error:
            for mailbox in self._mailboxes:
                mailbox.abort(request.step, str(error))
            raise

    def fetch(self, mpmd_idx: int, handle: Handle) -> Future[jax.Array | np.ndarray]:
        group = self._groups[mpmd_idx]
        return group.submit(partial(group.worker.fetch, handle))

    def free(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        self._ledger.drop(mpmd_idxs, handle)

    def next_handle(self) -> Handle:
        return self._ledger.next_handle()

    def close(self) -> None:
        """Ends the threads after the steps already submitted, and waits for them."""
        self._close()
