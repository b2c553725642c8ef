"""The subject of the benchmarks: the step compiled by ``mpmd``, in one process and on Ray."""

from __future__ import annotations

import jax
import numpy as np
import ray

import cluster
import mpmd
from benchmarks import model
from benchmarks.workload import Setting
from mpmd.arguments.signature import CallSignature
from mpmd.arrays.array import StepFuture
from mpmd.ir.events import Event

START_SECONDS = 240.0
"""The seconds that actors may take to start on a busy machine."""


class Ours:
    """The step on a mesh, which it closes in the end."""

    def __init__(self, setting: Setting, mesh):
        self._mesh = mesh
        self._state = model.init_state(setting.workload)
        self._batch = model.batch(setting.workload)
        function = model.train_step(setting.workload)
        self._signature = CallSignature.of(function, (), (), (0,))
        step = mpmd.jit(function, mesh, donate_argnums=0)
        self._step = step.compile(self._state, *self._batch)

    def run(self, steps: int) -> float:
        for _ in range(steps):
            self._state, loss = self._step(self._state, *self._batch)
        for leaf in jax.tree.leaves(self._state):
            leaf.block_until_ready()
        return float(loss)

    def profiled(self, steps: int) -> list[list[Event]]:
        """The events of all groups in each of so many steps in a row, none of which is awaited."""
        futures: list[StepFuture] = []
        for _ in range(steps):
            call = self._signature.bind((self._state, *self._batch), {})
            (self._state, _), future = self._step.submit(call, profile=True)
            futures.append(future)
        return [
            [event for reply in future.replies() for times in reply.times for event in times.events()]
            for future in futures
        ]

    def close(self) -> None:
        self._mesh.close()


class InProcess(Ours):
    """A thread for each group, over fake devices of the CPU."""

    def __init__(self, setting: Setting):
        devices = np.array(jax.devices()[: setting.workload.groups])
        super().__init__(setting, mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage",)), "stage"))


class InProcessInline(InProcess):
    """The same, with each task computed by the thread of its group, without a thread of JAX in between."""

    def __init__(self, setting: Setting):
        jax.config.update("jax_cpu_enable_async_dispatch", False)  # holds for devices that are made later
        super().__init__(setting)


class OnRay(Ours):
    """An actor for each group."""

    def __init__(self, setting: Setting):
        ray.init(address=setting.ray_address, log_to_driver=False)
        shape = {"stage": setting.workload.groups}
        super().__init__(setting, cluster.launch(shape, "stage", timeout=START_SECONDS))

    def close(self) -> None:
        super().close()
        ray.shutdown()
