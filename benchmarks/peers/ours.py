"""The subject of the benchmarks, the step compiled by ``mpmd``, beside the same step under ``jax.jit``."""

from __future__ import annotations

import jax

import mpmd
from benchmarks import model
from benchmarks.frame import in_process_mesh
from benchmarks.workload import Setting


class PlainJit:
    """The step under ``jax.jit`` on one device: no pipeline; the microbatches are a scan."""

    def __init__(self, setting: Setting):
        self._state, self._batch = model.init_state(setting.workload), model.batch(setting.workload)
        self._step = self._compiled(model.train_step(setting.workload))

    def _compiled(self, step):
        return jax.jit(step, donate_argnums=0)

    def run(self, steps: int) -> float:
        for _ in range(steps):
            self._state, loss = self._step(self._state, *self._batch)
        jax.block_until_ready(self._state)
        return float(loss)


class InProcess(PlainJit):
    """A thread for each group, over the devices of this process."""

    def __init__(self, setting: Setting):
        self._mesh = self._open(setting)
        super().__init__(setting)

    def _compiled(self, step):
        return mpmd.jit(step, self._mesh, donate_argnums=0).compile(self._state, *self._batch)

    def _open(self, setting: Setting):
        return in_process_mesh(setting.workload.groups)

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
