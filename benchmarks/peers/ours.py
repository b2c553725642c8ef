"""The subject of the benchmarks: the step compiled by ``mpmd``, in one process and on Ray."""

from __future__ import annotations

import jax

import mpmd
from benchmarks import model
from benchmarks.frame import in_process_mesh
from benchmarks.workload import Setting


class InProcess:
    """A thread for each group, over the devices of this process."""

    def __init__(self, setting: Setting):
        self._mesh = self._open(setting)
        self._state = model.init_state(setting.workload)
        self._batch = model.batch(setting.workload)
        step = mpmd.jit(model.train_step(setting.workload), self._mesh, donate_argnums=0)
        self._step = step.compile(self._state, *self._batch)

    def _open(self, setting: Setting):
        return in_process_mesh(setting.workload.groups)

    def run(self, steps: int) -> float:
        for _ in range(steps):
            self._state, loss = self._step(self._state, *self._batch)
        for leaf in jax.tree.leaves(self._state):
            leaf.block_until_ready()
        return float(loss)

    def close(self) -> None:
        self._mesh.close()


class InProcessInline(InProcess):
    """The thread of a group computes each task itself, without a thread of JAX in between."""

    def __init__(self, setting: Setting):
        jax.config.update("jax_cpu_enable_async_dispatch", False)  # holds for devices that are made later
        super().__init__(setting)


class OnRay(InProcess):
    """An actor for each group."""

    def _open(self, setting: Setting):
        return setting.setup.launch({"stage": setting.workload.groups}, "stage")
