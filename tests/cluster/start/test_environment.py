"""Additions to the environment of a group's process."""

import math

import jax
import pytest

import cluster
from cluster.protocol.endpoint import Endpoint
from cluster.start.environment import _DRIVERS, actor_environment, gpu_memory, without_effect
from cluster.start.processes import PlannedProcesses, runtime_envs_of
from cluster.start.shapes import LaunchRequest
from mpmd.ir.reshard import GroupShape


def test_a_group_gets_its_devices_and_threads():
    assert actor_environment({}, "", "cpu", num_devices=2, num_threads=3) == {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "NPROC": "3",
        "XLA_FLAGS": "",
    }
    assert actor_environment({}, "--a", "cuda", 2, 3) == {"JAX_PLATFORMS": "cuda", "NPROC": "3"}


def test_the_flags_of_the_driver_are_kept():
    assert actor_environment({}, "--a=1 --b", "cpu", 2, 4)["XLA_FLAGS"] == "--a=1 --b"


def test_programs_for_one_thread_are_not_scheduled_for_many():
    flag = "--xla_cpu_enable_concurrency_optimized_scheduler"
    assert actor_environment({}, "", "cpu", 1, 1)["XLA_FLAGS"] == f"{flag}=false"
    given = {"XLA_FLAGS": f"{flag}=true"}
    assert actor_environment(given, "", "cpu", 1, 1)["XLA_FLAGS"] == f"{flag}=true"


def test_collectives_between_processes_do_not_wait_forever():
    flag = "--xla_cpu_collective_timeout_seconds"
    assert f"{flag}=60" in actor_environment({}, "", "cpu", 1, 2, num_processes=2)["XLA_FLAGS"]
    given = {"XLA_FLAGS": f"{flag}=7"}
    assert actor_environment(given, "", "cpu", 1, 2, num_processes=2)["XLA_FLAGS"] == f"{flag}=7"


def test_variables_of_the_user_take_precedence():
    given = {"XLA_FLAGS": "--c", "NPROC": "9", "OF_MINE": "x"}
    environment = actor_environment(given | {"JAX_NUM_CPU_DEVICES": "8"}, "--a", "cpu", 1, 2)
    assert environment == given | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


FRACTION, PREALLOCATE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"


@pytest.mark.parametrize("processes", [2, 3, 4, 7, 100])
def test_processes_that_share_a_gpu_fit_into_its_memory(processes):
    fraction = float(gpu_memory({}, 1 / processes, shares=False)[FRACTION])
    assert math.isclose(processes * fraction, 0.75, rel_tol=1e-3)


@pytest.mark.parametrize("gpus", [None, 0, 1, 2])
def test_a_process_with_whole_gpus_takes_what_jax_takes(gpus):
    assert gpu_memory({}, gpus, shares=False) == {}
    assert gpu_memory({}, gpus, shares=True) == {PREALLOCATE: "false"}


def test_the_memory_that_the_user_wants_is_kept():
    assert gpu_memory({FRACTION: "0.1", PREALLOCATE: "true"}, 0.25, shares=True) == {}
    # JAX refuses both names of the fraction together.
    assert gpu_memory({"XLA_CLIENT_MEM_FRACTION": "0.1"}, 0.25, shares=False) == {}


@pytest.mark.parametrize(("platform", "shared"), [("cuda", True), ("rocm", True), ("cpu", False)])
def test_groups_get_their_part_of_the_memory_of_a_gpu(platform, shared, monkeypatch):
    monkeypatch.setattr("cluster.start.processes.threads_per_process", lambda nodes: [1] * len(nodes))
    shape = GroupShape({"stage": 1}, 1)
    members = tuple(Endpoint(mpmd_idx, 0, (shape, shape)) for mpmd_idx in range(2))
    processes, nodes = PlannedProcesses(platform, members, [{"CPU": 1.0, "GPU": 0.25}] * 2), ["a", "a"]
    request = LaunchRequest({"stage": 2}, "stage", None, gpus_per_group=0.25)
    for given in ({}, {FRACTION: "0.5"}):
        for each in runtime_envs_of(processes, nodes, request, {"env_vars": given}, may_share=False):
            default = "0.1875" if shared else None
            assert each["env_vars"].get(FRACTION) == given.get(FRACTION, default)
            assert PREALLOCATE not in each["env_vars"]


@pytest.mark.parametrize("name", _DRIVERS)
def test_settings_of_jax_that_steps_have_from_the_driver(name):
    """A variable that says what holds on the driver anyway is no mistake."""
    value = getattr(jax.config, name)
    assert without_effect({name.upper(): str(getattr(value, "value", value))}, jax.config) == []
    (text,) = without_effect({name.upper(): "other", "OF_MINE": "1"} | _flipped(name, value), jax.config)
    assert text.startswith(f"{name.upper()}=") and "has no effect" in text
    assert f"jax.config.update('{name}', ...)" in text


def _flipped(name, value):
    return {name.upper(): "0" if value else "1"} if isinstance(value, bool) else {}


def test_a_launch_says_that_a_setting_has_no_effect():
    settings = {"env_vars": {"JAX_DEBUG_NANS": "1"}}
    with (
        pytest.warns(UserWarning, match=r"JAX_DEBUG_NANS=1 .* no effect: .* where it is False now\. Set it"),
        pytest.raises(ConnectionError),
    ):
        cluster.launch({"stage": 1}, "stage", runtime_env=settings, address="127.0.0.1:1")
