"""Starting groups, the failures of that, and ending them."""

import contextlib
import os
import re

import jax
import numpy as np
import pytest
import ray

import cluster
import mpmd
from cluster import trial
from mpmd.meshes.group_mesh import GroupMesh
from tests.ray.conftest import launch
from tests.ray.hand_written_programs import compute_forever, relay_program, relaying
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.subprocesses import run_code
from tests.support.waiting import await_that

SECONDS = 15


def await_free_cpus(amount):
    await_that(lambda: ray.available_resources().get("CPU", 0) == amount)


@pytest.fixture
def free(local_ray):
    """The CPUs that no group has, when those of earlier tests are given back, which takes Ray a moment."""
    reserved = sum(
        bundle.get("CPU", 0)
        for table in ray.util.placement_group_table().values()
        if table["state"] == "CREATED"
        for bundle in table["bundles"].values()
    )
    cpus = ray.cluster_resources()["CPU"] - reserved
    await_free_cpus(cpus)
    return cpus


def test_a_mesh_has_a_process_with_its_devices_for_each_group(two_groups):
    mesh: GroupMesh = two_groups
    assert (mesh.mpmd_dim, mesh.mpmd_axis_name, two_groups.platform) == (2, "stage", "cpu")
    assert mesh.abstract_submeshes[1] == jax.sharding.AbstractMesh(
        (1, 2), ("stage", "fsdp"), (jax.sharding.AxisType.Auto,) * 2
    )
    assert repr(mesh) == ("ClusterMesh({'stage': 2, 'fsdp': 2}, mpmd_axis='stage', platform='cpu', nodes=1)")
    assert [group.mpmd_idx for group in two_groups.groups] == [0, 1]
    assert [len(group.devices) for group in two_groups.groups] == [2, 2]
    assert len({os.getpid(), *(group.pid for group in two_groups.groups)}) == 3
    answers = ray.get([actor.health.remote() for actor in two_groups.runtime.actors], timeout=20)
    assert {doing.what for doing in answers} == {"idle"}


def test_a_lack_of_resources_shows_what_is_requested_and_available(free, capsys):
    with pytest.raises(RuntimeError) as caught:
        cluster.launch({"stage": 3}, "stage", cpus_per_group=50, gpus_per_group=1, timeout=1)
    message = str(caught.value)
    assert "no room for the groups within 1 s" in message
    assert "3 processes of 50 CPU, 1 GPU each, every one on one node" in message
    assert f"CPU: 150 asked, {free:g} available of 4, {150 - free:g} missing" in message
    assert "GPU: 3 asked, 0 available of 0, 3 missing" in message
    assert "nodes: 4 CPU, 0 GPU" in message
    assert "waiting up to 1 s" in capsys.readouterr().err
    await_free_cpus(free)


@pytest.mark.slow
def test_an_actor_that_cannot_start_names_the_group(free):
    with pytest.raises(RuntimeError, match="group 0 could not start") as caught:
        launch({"stage": 1}, platform="nowhere")
    assert "nowhere" in str(caught.value)
    await_free_cpus(free)


@pytest.mark.slow
def test_an_actor_that_starts_slowly_is_named_with_what_it_does_and_its_logs(free, tmp_path):
    """One of the modules that it imports takes a minute."""
    tmp_path.joinpath("xxhash.py").write_text("import time; time.sleep(60)")
    paths = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    with pytest.raises(RuntimeError, match="the actors of group 0 did not start within 5 s") as caught:
        launch({"stage": 1}, timeout=5, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    _, progress, advice = str(caught.value).splitlines()
    assert re.fullmatch(r"  group 0: (process \d+ imports JAX|queued, .*)", progress)
    logs = re.search("Ray's logs are in (.*) on the node", advice)[1]
    assert os.path.isdir(logs) and "launch(timeout=...)" in advice
    await_free_cpus(free)


@pytest.mark.slow
def test_close_fails_pending_calls_gives_the_resources_back_and_may_be_repeated(free):
    with launch(cpus_per_group=0.5) as mesh:
        await_free_cpus(free - 1)
        runtime, driver = mesh.runtime, relaying(mesh, compute_forever)
        futures, _ = driver.step()
    mesh.close()
    later, _ = driver.step()
    for future in [*futures.values(), *later.values(), runtime.fetch(0, 0)]:
        with pytest.raises(RuntimeError, match="closed"):
            future.result(SECONDS)
    with pytest.raises(RuntimeError, match="closed"):
        runtime.load(relay_program())
    runtime.free((0, 1), driver.handles["x"])  # as the garbage collector may
    with pytest.raises(RuntimeError, match="the mesh was closed; launch another one"):
        mesh.runtime  # noqa: B018
    assert repr(mesh).endswith("closed)")
    await_free_cpus(free)
    assert ray.is_initialized()


@pytest.mark.slow
def test_dropping_the_mesh_ends_the_groups(free):
    mesh = launch({"stage": 1}, cpus_per_group=0.5)
    del mesh
    await_free_cpus(free)


def environment_of(group):
    with open(f"/proc/{group.pid}/environ", "rb") as file:
        return dict(entry.decode().split("=", 1) for entry in file.read().split(b"\0") if b"=" in entry)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="reads it")
def test_the_users_runtime_env_reaches_the_groups(local_ray):
    variables = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false", "OF_MINE": "kept"}
    runtime_env = {"env_vars": variables}
    shape = {"stage": 1, "fsdp": 3}
    with launch(shape, runtime_env=runtime_env) as mesh:
        assert len(mesh.groups[0].devices) == 3
        environment = environment_of(mesh.groups[0])
    assert (environment["OF_MINE"], environment["JAX_NUM_CPU_DEVICES"]) == ("kept", "3")
    assert environment["XLA_FLAGS"].startswith(variables["XLA_FLAGS"])
    assert runtime_env == {"env_vars": variables}


@pytest.mark.slow
def test_without_ray_a_local_one_is_started_with_a_message_and_ended():
    out, err = run_code(
        """
        import cluster, ray
        if __name__ == "__main__":
            with cluster.launch({"stage": 1}, mpmd_axis="stage") as mesh:
                print(mesh.mpmd_dim, ray.is_initialized())
            print(ray.is_initialized())
        """
    )
    assert out.split() == ["1", "True", "False"]
    assert err.count("started Ray on this machine") == 1


@pytest.mark.usual("variable")  # by which a job finds the cluster, too
@pytest.mark.parametrize("given_as", ["argument", "variable"])
def test_launch_joins_the_cluster_at_an_address(free, given_as):
    """The driver exits without closing the mesh, which ends the groups."""
    address = ray.get_runtime_context().gcs_address
    given = repr(address) if given_as == "argument" else None
    out, err = run_code(
        f"""
        import cluster, ray
        mesh = cluster.launch({{"stage": 1}}, "stage", cpus_per_group=0.25, address={given})
        print(ray.get_runtime_context().gcs_address)
        """,
        **({"RAY_ADDRESS": address} if given_as == "variable" else {}),
    )
    assert out.split() == [address]
    assert "started Ray" not in err
    await_free_cpus(free)


def test_the_trial_of_the_doctor_runs_a_step_on_actors(two_groups, monkeypatch):
    """On groups that are there, which have the cluster's CPUs."""
    monkeypatch.setattr(cluster, "launch", lambda *arguments, **options: contextlib.nullcontext(two_groups))
    found = trial.on_ray()
    assert found["text"].startswith("a step on 2 actors (2 on ")
    assert "computes what jax.jit computes, and the same bits again" in found["text"]
    assert found["other_bits"] == [] and found["nodes"][0]["cpus"] == 4


@pytest.mark.slow
def test_shutting_ray_down_under_the_mesh_fails_pending_calls_and_starts_no_other_ray():
    out, _ = run_code(
        """
        import cluster, ray
        ray.init(address="local", num_cpus=1, include_dashboard=False)
        mesh = cluster.launch({"stage": 1}, "stage")
        forever = mesh.runtime._calls.call_ray(0, "serve")
        ray.shutdown()
        later = mesh.runtime.fetch(0, 0)
        print(forever.exception(timeout=30) is not None, later.exception(timeout=30) is not None)
        mesh.close()
        print(ray.is_initialized())
        """
    )
    assert out.split() == ["True", "True", "False"]


@pytest.mark.slow
def test_a_later_run_finds_what_an_earlier_one_has_compiled(local_ray, tmp_path):
    step = make_step(mse, mpmd.Std1F1B(2))

    def run():
        with launch(compilation_cache=tmp_path) as mesh:
            assert list(mesh.seconds) == ["ray", "resources", "actors", "transports"]
            assert all(seconds >= 0 for seconds in mesh.seconds.values())
            compiled = mpmd.jit(step, mpmd_mesh=mesh, donate_argnums=0)
            result = compiled(*(arguments := (init(weights(2)), *batch(3))))
            result = compiled(result[0], *arguments[1:])
            return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result)]

    first = run()
    compiled = {path.name for path in tmp_path.iterdir()}
    assert compiled
    assert run() == first
    assert {path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")} <= compiled


@pytest.mark.slow
def test_without_a_compilation_cache_nothing_is_kept(local_ray):
    with launch({"stage": 1}, compilation_cache=None) as mesh:
        (actor,) = mesh.runtime.actors
        assert ray.get(actor.__ray_call__.remote(lambda _: jax.config.jax_compilation_cache_dir)) is None
