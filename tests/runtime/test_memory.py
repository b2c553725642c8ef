"""What groups hold while a step runs is what its plan says."""

import collections
import weakref

import jax
import numpy as np
import pytest

import mpmd
from mpmd.runtime import executor, operations, worker
from mpmd.runtime.executor import Executor
from mpmd.schedules.families import FAMILIES, build
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of

TRAINING = [name for name in FAMILIES if name != "ForwardOnly"]
GROUPS = 2


class Watch:
    """Looks at a group's values after each operation that makes or takes some."""

    def __init__(self, monkeypatch):
        self.peak_bytes = collections.Counter()
        self.copied = []
        self._spy(monkeypatch, operations.RunTask, "mpmd_idx")
        self._spy(monkeypatch, operations.ReceiveMessage, "dst")

    def _spy(self, monkeypatch, operation, group):
        perform = operation.perform

        def watched(this, state):
            given = [state.table[slot] for slot in getattr(this, "donated", ())]
            perform(this, state)
            self.copied += [
                (this.label, array.aval)
                for array in given
                if isinstance(array, jax.Array) and not array.is_deleted()
            ]
            held = {id(value): value.nbytes for value in state.table if value is not None}
            mpmd_idx = getattr(this, group)
            self.peak_bytes[mpmd_idx] = max(self.peak_bytes[mpmd_idx], sum(held.values()))

        monkeypatch.setattr(operation, "perform", watched)


def wait_for(arrays):
    """Waits without a look at the arrays, which would keep their buffers from being donated."""
    for array in jax.tree.leaves(arrays):
        array.block_until_ready()


@pytest.mark.usual("DualPipeV")
@pytest.mark.parametrize("name", TRAINING)
def test_groups_hold_what_the_plan_says(name, monkeypatch):
    monkeypatch.setattr(executor, "INLINE_BYTES", 0)  # numpy's view of a result keeps it from being donated
    schedule = build(name, GROUPS)
    step = make_step(mse, schedule)

    with mesh_of(GROUPS) as mesh:
        compiled = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0).compile(
            init(weights(schedule.num_stages)), *batch(5)
        )
        state, _ = compiled(init(weights(schedule.num_stages)), *batch(5))
        wait_for(state)
        watch = Watch(monkeypatch)
        wait_for(compiled(state, *batch(5)))
        planned = {group.mpmd_idx: group.memory.live_bytes for group in compiled.report().groups}
    assert watch.peak_bytes == planned
    assert not watch.copied


def test_a_batch_is_gone_when_memory_is_measured(monkeypatch):
    given, alive, execute, memory_use = [], [], Executor.execute, worker.memory_use

    def watched(executor, state, inputs):
        given.extend(map(weakref.ref, inputs))
        return execute(executor, state, inputs)

    def measured(devices):
        alive.extend(array for each in given if (array := each()) is not None)
        return memory_use(devices)

    monkeypatch.setattr(Executor, "execute", watched)
    monkeypatch.setattr(worker, "memory_use", measured)
    with mesh_of(1) as mesh:
        step = mpmd.jit(make_step(mse, mpmd.GPipe(1)), mpmd_mesh=mesh, donate_argnums=0)
        state, _ = step(init(weights(1)), *map(np.asarray, batch()))
        wait_for(state)
    assert given and not alive
