"""Drives the groups: ships programs, asks for steps, fetches values."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import threading
import weakref
from concurrent.futures import Future

import jax
import numpy as np
import ray

from cluster.groups import Groups
from cluster.wire import Packed, pack, unpack
from cluster.worker import Shipment
from mpmd.ir import Executable, Spec
from mpmd.program import Function, Program, export_function
from mpmd.runtime.resolve import resolve_specs
from mpmd.runtime.runtime import HandleLedger, Loaded
from mpmd.runtime.sent import SentArrays
from mpmd.runtime.worker import Handle, StepReply, StepRequest
from mpmd.timing import Stopwatch


class RayRuntime:
    """Implements ``mpmd.runtime.runtime.Runtime`` with one actor per group.

    A step is one request to each group, whatever the program. ``close`` ends the actors; so does dropping
    the last reference to the runtime, and the exit of the interpreter.

    Args:
      groups: the running actors.
      submesh: the shape of every group's submesh.
      platform: the groups' devices, as ``jax.export`` names them.
    """

    def __init__(self, groups: Groups, submesh: jax.sharding.AbstractMesh, platform: str):
        self._groups = groups
        self._submesh = submesh
        self._platform = platform
        self._ledger = HandleLedger(len(groups.actors))
        self.sent = SentArrays(self._ledger.drop)
        self._programs = itertools.count()
        self._submitting = threading.Lock()
        weakref.finalize(self, groups.close_soon).atexit = False  # at exit, the groups close themselves

    @property
    def actors(self) -> tuple[ray.actor.ActorHandle, ...]:
        """The actors, by ``mpmd_idx``."""
        return self._groups.actors

    def load(self, program: Program) -> Loaded:
        """Ships a program once, and has all groups compile their part at the same time.

        Raises: ``TaskError`` with the label ``load`` when a group cannot, ``GroupDiedError`` when one died,
          ``ValueError`` when a function cannot travel.
        """
        number = next(self._programs)
        watch = Stopwatch()
        exports = _Exports(self._submesh, self._platform, watch)

        def output_specs(mpmd_idx: int, executable: Executable, function: Function) -> tuple[Spec, ...]:
            exported = exports.of(executable, function)
            return self._groups.call(mpmd_idx, "output_specs", executable, exported).result()

        with watch("resolve"):
            program = resolve_specs(program, output_specs)
        exported = {e.name: exports.of(e, program.functions[e.name]) for e in program.plan.executables}
        with watch("load"):
            shipment = ray.put(
                Shipment(program.plan, exported, program.constants, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
            )
            everywhere = range(len(self.actors))
            for shipped in [self._groups.call_ray(i, "ship", number, shipment) for i in everywhere]:
                shipped.result()
            loading = [self._groups.call(i, "load", number) for i in everywhere]
            concurrent.futures.wait(loading)
            xla_seconds = tuple(future.result() for future in loading)
        return Loaded(number, program, watch.seconds, xla_seconds)

    def submit(self, requests: dict[int, StepRequest]) -> dict[int, Future[StepReply]]:
        (step,) = {request.step for request in requests.values()}
        with self._submitting:  # all groups must see the steps in the same order
            try:
                return self._groups.step(step, {i: self._packed(i, r) for i, r in requests.items()})
            except RuntimeError as error:  # a group has died, or the mesh was closed
                return {mpmd_idx: _failed(error) for mpmd_idx in requests}

    def _packed(self, mpmd_idx: int, request: StepRequest) -> tuple[StepRequest, dict[Handle, Packed]]:
        puts = {handle: pack(np.asarray(array)) for handle, array in request.puts.items()}
        frees = self._ledger.take_dropped(mpmd_idx)
        return dataclasses.replace(request, puts={}, frees=frees), puts

    def fetch(self, mpmd_idx: int, handle: Handle) -> Future[jax.Array | np.ndarray]:
        try:
            decode = _copied if self._groups.by_ray else unpack
            return self._groups.call(mpmd_idx, "fetch", handle, decode=decode)
        except RuntimeError as error:
            return _failed(error)

    def free(self, mpmd_idxs: tuple[int, ...], handle: Handle) -> None:
        self._ledger.drop(mpmd_idxs, handle)

    def next_handle(self) -> Handle:
        return self._ledger.next_handle()

    def close(self) -> None:
        """Kills the actors; everything outstanding fails. May be called again."""
        self._groups.close()


class _Exports:
    """Exports each function once for the input specs it is wanted with."""

    def __init__(self, submesh: jax.sharding.AbstractMesh, platform: str, watch: Stopwatch):
        self._submesh = submesh
        self._platform = platform
        self._watch = watch
        self._done: dict[tuple, bytes] = {}

    def of(self, executable: Executable, function: Function) -> bytes:
        key = (id(function), executable.inputs, executable.in_specs)
        if key not in self._done:
            with self._watch("export"):
                self._done[key] = export_function(function, executable, self._submesh, self._platform)
        return self._done[key]


def _copied(packed: Packed) -> np.ndarray:
    """A copy, because a view of Ray's memory would not outlive Ray; read-only, as what JAX gives."""
    array = np.array(unpack(packed))
    array.flags.writeable = False
    return array


def _failed(error: BaseException) -> Future:
    future: Future = Future()
    future.set_exception(error)
    return future
