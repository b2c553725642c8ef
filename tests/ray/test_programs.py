"""Which programs an actor holds, and that they do not disturb one another."""

import gc

import numpy as np
import pytest
import ray

import mpmd
from tests.ray.hand_written_programs import relay_program, relaying
from tests.support.models import batch, init, make_step, mse, weights

SECONDS = 60
STEP = make_step(mse, mpmd.Std1F1B(2))


def held(mesh):
    """For each actor the numbers of the programs that are loaded, and of those that were only shipped."""

    def look(actor):
        return sorted(actor._worker._programs), sorted(actor._shipments)

    return ray.get([actor.__ray_call__.remote(look) for actor in mesh.runtime.actors], timeout=SECONDS)


@pytest.fixture
def relay(two_groups):
    """A driver whose steps tell the groups what was released before, and the programs they hold then."""
    gc.collect()
    driver = relaying(two_groups)

    def run():
        gc.collect()
        futures, outputs = driver.step()
        assert futures[0].result(SECONDS).inline[outputs["end"]] == 4

    run()
    yield run, held(two_groups)
    two_groups.runtime.unload(driver.number)


def test_a_dropped_step_is_unloaded(two_groups, relay):
    run, before = relay
    step = mpmd.jit(STEP, mpmd_mesh=two_groups)
    state, _ = step(init(weights(2)), *batch())
    assert [len(programs) for programs, _ in held(two_groups)] == [len(before[0][0]) + 1] * 2
    del step
    run()
    assert held(two_groups) == before
    assert np.isfinite(np.asarray(state[0][0]["w"])).all()


@pytest.mark.slow
def test_a_program_that_does_not_reach_all_groups_stays_nowhere(two_groups, relay, monkeypatch):
    class Broken:
        def __reduce__(self):
            return int, ("not a shipment",)

    run, before = relay
    call_ray = two_groups.runtime._calls.call_ray

    def broken(mpmd_idx, method, number, shipment):
        return call_ray(mpmd_idx, method, number, ray.put(Broken()) if mpmd_idx else shipment)

    def interrupted(mpmd_idx, method, number, shipment):
        if mpmd_idx:
            raise KeyboardInterrupt
        return call_ray(mpmd_idx, method, number, shipment)

    for fault, raised in ((broken, Exception), (interrupted, KeyboardInterrupt)):
        with monkeypatch.context() as patched, pytest.raises(raised):
            patched.setattr(two_groups.runtime._calls, "call_ray", fault)
            two_groups.runtime.load(relay_program())
        run()
        assert held(two_groups) == before
