"""Groups that die are replaced, and the run goes on as if nothing had happened, bit by bit."""

import os
import signal

import jax
import numpy as np
import pytest
import ray
from jax.sharding import PartitionSpec as P

import cluster
import mpmd
from cluster.recovery import Recovery
from mpmd.errors import StateLostError
from mpmd.runtime.requests import Write
from tests.ray.conftest import launch
from tests.support.models import CLIPPED_ADAM, batch, init, make_step, mse, weights
from tests.support.waiting import await_that

STEPS = 12


@pytest.fixture(scope="module")
def recovering_mesh(local_ray):
    """Two groups that are replaced when they die. Tests leave it usable."""
    recovery = Recovery(every=4, max_failures=20)
    with launch(recovery=recovery) as mesh:
        yield mesh


def compiled(mesh, stages=2, **options):
    function = make_step(mse, mpmd.Std1F1B(stages), CLIPPED_ADAM)
    return mpmd.jit(function, mesh, donate_argnums=0, **options)


def train(step, disturb=lambda number, state: None, steps=STEPS, state=None):
    """All losses, and the bytes of the state in the end. ``disturb`` is called when a step is submitted."""
    state, losses = state or init(weights(2), CLIPPED_ADAM), []
    xs, ys = map(np.asarray, batch())
    for number in range(steps):
        state, (loss, _) = step(state, xs + number, ys)
        disturb(number, state)
        losses.append(float(loss))
    return losses, [leaf.tobytes() for leaf in jax.tree.leaves(mpmd.to_host(state))]


def recoveries(mesh, count):
    """The reports, once there are so many: results do not wait for the report of a recovery."""
    await_that(lambda: len(mesh.recoveries) >= count)
    return mesh.recoveries


def num_reserved():
    """How many placement groups have resources."""
    return sum(table["state"] == "CREATED" for table in ray.util.placement_group_table().values())


def kill(mesh, mpmd_idx, number=signal.SIGKILL):
    os.kill(mesh.groups[mpmd_idx].pid, number)


def loaded_programs(mesh):
    """The numbers of the programs that each process has."""
    asked = [a.__ray_call__.remote(lambda self: set(self._worker._programs)) for a in mesh.runtime.actors]
    return ray.get(asked, timeout=60)


def test_each_group_may_die(recovering_mesh, capsys):
    mesh = recovering_mesh
    step = compiled(mesh)
    undisturbed = train(step)
    pids, before = [group.pid for group in mesh.groups], len(mesh.recoveries)
    others = []

    def disturb(number, state):
        if number in (6, 10):
            kill(mesh, 0 if number == 6 else 1)
            for leaf in jax.tree.leaves(state):
                leaf.copy_to_host_async()  # is answered after the recovery
            # Loading a program waits for it as well.
            others.append(mpmd.jit(make_step(mse, mpmd.GPipe(2)), mesh))
            others[-1].compile(init(weights(2)), *batch())

    assert train(step, disturb) == undisturbed
    assert [report.mpmd_idxs for report in recoveries(mesh, before + 2)[before:]] == [(0,), (1,)]
    assert set(pids).isdisjoint(group.pid for group in mesh.groups)
    first = mesh.recoveries[before]
    assert list(first.seconds) == ["started", "connected", "loaded", "restored", "replayed"]
    assert 0 < first.num_replayed <= 8
    assert first.reason.startswith("group 0 died")
    told = []  # by a thread, when all is as before
    await_that(lambda: told.append(capsys.readouterr().err) or "cluster: recovered group 1" in "".join(told))
    assert "".join(told).count("cluster: recovered group") == 2
    first_has, second_has = loaded_programs(mesh)
    assert first_has == second_has, "what was not loaded by all stays nowhere"
    expected = jax.jit(make_step(mse, mpmd.GPipe(2)))(init(weights(2)), *batch())[1][0]
    for other in others:  # which only one of the present processes was there to load
        np.testing.assert_allclose(float(other(init(weights(2)), *batch())[1][0]), expected, rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_is_completed_by_the_process_that_takes_the_place_of_a_dead_one(
    recovering_mesh, tmp_path, monkeypatch
):
    """It dies when it has copied its values, and is to write them; the step after has taken them over."""
    runtime = recovering_mesh.runtime
    step = compiled(recovering_mesh).compile(init(weights(2), CLIPPED_ADAM), *map(np.asarray, batch()))
    undisturbed = train(step, steps=4)
    expected = mpmd.to_host(step(init(weights(2), CLIPPED_ADAM), *map(np.asarray, batch()))[0])
    ask, deaths, saving = runtime.ask, [], []

    def dying(requests):
        if not deaths and any(isinstance(request, Write) for request in requests.values()):
            deaths.append(kill(recovering_mesh, min(requests)))
        return ask(requests)

    def disturb(number, state):
        if number == 0:
            saving.append(mpmd.save_async(tmp_path / "saved", state))

    with monkeypatch.context() as patched:
        patched.setattr(runtime, "ask", dying)
        assert train(step, disturb, steps=4) == undisturbed
        saving[0].result()
    assert deaths
    assert runtime.last_checkpoint == str(tmp_path / "saved")
    restored = mpmd.to_host(step.restore(tmp_path / "saved"))
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert leaf.tobytes() == wanted.tobytes()


@pytest.mark.slow
def test_a_spare_takes_the_place_of_the_dead_and_two_deaths_lose_the_values(local_ray, tmp_path):
    """With Ray's calls in place of the driver's connections."""
    recovery = Recovery(every=4, spares=1, max_failures=10)
    with launch(transport="object_store", recovery=recovery) as mesh:
        step = compiled(mesh).compile(init(weights(2), CLIPPED_ADAM), *map(np.asarray, batch()))
        undisturbed = train(step)
        spare = mesh.runtime._processes.spares._spares[0].actor
        assert train(step, lambda number, state: number == 6 and kill(mesh, 1)) == undisturbed
        assert mesh.runtime.actors[1] == spare
        state = init(weights(2), CLIPPED_ADAM)
        mpmd.save(tmp_path / "saved", step(state, *map(np.asarray, batch()))[0])
        from_disk = train(step, state=step.restore(tmp_path / "saved"))
        held = []

        def disturb(number, state):
            if number == 6:
                held.append(state)
                for mpmd_idx in (0, 1):
                    kill(mesh, mpmd_idx)

        with pytest.raises(StateLostError, match="have died together") as caught:
            train(step, disturb)
        assert caught.value.checkpoint == str(tmp_path / "saved")
        with pytest.raises(StateLostError, match="have died together"):
            mpmd.to_host(held[0])
        assert recoveries(mesh, 2)[-1].lost.endswith("have died together")
        # The mesh and the loaded step go on, and are repaired again.
        state = step.restore(caught.value.checkpoint)
        assert train(step, lambda number, state: number == 6 and kill(mesh, 0), state=state) == from_disk
        assert [report.lost for report in recoveries(mesh, 3)[2:]] == [None]


@pytest.mark.slow
def test_groups_share_a_place_and_get_their_own_back_on_request(recovering_mesh, capsys):
    mesh = recovering_mesh
    step = compiled(mesh)
    undisturbed = train(step)
    before, reserved = len(mesh.recoveries), num_reserved()
    tables = []

    def disturb(number, state):
        if number in (3, 7):
            mesh.resize(1 if number == 3 else 2)
            tables.append((str(mesh.status()), num_reserved()))

    assert train(step, disturb) == undisturbed
    shared, parted = mesh.recoveries[before:]
    assert (shared.kind, shared.mpmd_idxs, shared.shares_with) == ("shrunk", (1,), {1: 0})
    assert (parted.kind, parted.mpmd_idxs, parted.shares_with) == ("grown", (1,), {})
    assert list(shared.seconds)[:3] == ["prepared", "copied", "started"]
    assert shared.num_replayed == parted.num_replayed == 0
    (sharing, of_one), (apart, of_two) = tables
    assert "shared with group 0" in sharing and "shared" not in apart
    assert (of_one, of_two) == (reserved - 1, reserved)
    assert "moved (shrunk) group 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_that_is_told_to_end_is_replaced_before(local_ray):
    """Its node is the only one, so the group stays there."""
    recovery = Recovery(every=4, max_failures=1)
    with launch(recovery=recovery) as mesh:
        step = compiled(mesh)
        undisturbed = train(step)
        pids = [group.pid for group in mesh.groups]

        def disturb(number, state):
            if number in (3, 7):
                kill(mesh, 1, signal.SIGTERM)
                recoveries(mesh, 1 if number == 3 else 2)

        assert train(step, disturb) == undisturbed
        assert [(report.kind, report.mpmd_idxs) for report in mesh.recoveries] == [("drained", (1,))] * 2
        assert sum(report.num_replayed for report in mesh.recoveries) == 0
        assert mesh.groups[0].pid == pids[0] != mesh.groups[1].pid


@pytest.mark.slow
def test_a_group_that_hangs_is_replaced(recovering_mesh, monkeypatch):
    monkeypatch.setattr(cluster.driver.calls.liveness, "PING_SECONDS", 1)
    monkeypatch.setattr(cluster.driver.calls.liveness, "UNRESPONSIVE_SECONDS", 5)
    step = compiled(recovering_mesh)
    undisturbed = train(step)
    before = len(recovering_mesh.recoveries)

    def disturb(number, state):
        if number == 6:
            kill(recovering_mesh, 0, signal.SIGSTOP)

    assert train(step, disturb) == undisturbed
    (report,) = recoveries(recovering_mesh, before + 1)[before:]
    assert report.reason.startswith("group 0 is stuck")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "device", "network"])
def test_a_group_of_several_processes_is_replaced_as_a_whole(local_ray, transport):
    options = {"processes_per_group": 2, "transport": transport, "recovery": Recovery(every=4)}
    with launch({"stage": 2, "fsdp": 2}, **options) as mesh:
        step = compiled(mesh, in_specs=(P(), P(None, "fsdp"), P(None, "fsdp")))
        undisturbed = train(step)
        pids = [process.pid for process in mesh.processes]
        assert (
            train(step, lambda number, state: number == 6 and os.kill(pids[3], signal.SIGKILL)) == undisturbed
        )
        now = [process.pid for process in mesh.processes]
        assert now[:2] == pids[:2]
        assert set(now[2:]).isdisjoint(pids)
