"""The step under ``jax.jit`` on one device: no pipeline; the microbatches are a scan."""

from __future__ import annotations

import jax

from benchmarks import model
from benchmarks.workload import Setting


class PlainJit:
    def __init__(self, setting: Setting):
        self._step = jax.jit(model.train_step(setting.workload), donate_argnums=0)
        self._state = model.init_state(setting.workload)
        self._batch = model.batch(setting.workload)

    def run(self, steps: int) -> float:
        for _ in range(steps):
            self._state, loss = self._step(self._state, *self._batch)
        jax.block_until_ready(self._state)
        return float(loss)
