"""Groups of several processes: values, faults, and what keeps their collectives together."""

import concurrent.futures
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.errors import GroupDiedError, TaskError
from tests.ray.conftest import launch
from tests.support.parity import assert_close
from tests.support.waiting import await_that

# A task that takes forever has most of the work.
pytestmark = pytest.mark.filterwarnings("ignore:group . .* of the operations:mpmd.PerformanceWarning")

WIDTH, ROWS, MICROBATCHES = 16, 8, 2
SPECS = (P(), P(None, "fsdp"), P(None, "fsdp"))
FOREVER = 10**8
SOON = 30
"""Seconds within which the death of a process ends all waiting for its group."""


def evaluation(loops):
    """Two stages. The second one has so many collectives, because each loop takes a mean over the rows."""

    def loss(weights, x, y):
        def mix(_, h):
            return jnp.tanh(h @ weights[1]) + jnp.mean(h)

        h = mpmd.mark_stage_end(jnp.tanh(x @ weights[0]))
        return jnp.mean((jax.lax.fori_loop(0, loops, mix, h) - y) ** 2)

    def step(weights, xs, ys):
        return mpmd.treduce(
            lambda mb: loss(weights, *mb), (xs, ys), mpmd.ForwardOnly(2, 2), operation=mpmd.Add
        )

    return step


def arguments():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for _ in range(2)]
    xs, ys = rng.normal(size=(2, MICROBATCHES, ROWS, WIDTH)).astype(np.float32)
    return weights, xs, ys


def launch_processes(**options):
    return launch({"stage": 2, "fsdp": 2}, processes_per_group=2, **options)


@pytest.fixture
def disposable_mesh(local_ray):
    with launch_processes() as mesh:
        yield mesh


def jitted(loops, mesh):
    return mpmd.jit(evaluation(loops), mesh, in_specs=SPECS)


def processor_seconds(pid):
    times = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_computing(process):
    """Waits until a process has computed for a while, which it does in the endless task alone."""
    start = processor_seconds(process.pid)
    await_that(lambda: processor_seconds(process.pid) >= start + 1, 60)


def test_every_process_has_its_part_of_the_devices(two_process_groups):
    found = [(p.mpmd_idx, p.rank, len(p.devices)) for p in two_process_groups.processes]
    assert found == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
    assert [group.rank for group in two_process_groups.groups] == [0, 0]
    assert len({process.pid for process in two_process_groups.processes}) == 4
    pairs = two_process_groups.transports
    assert pairs == dict.fromkeys([(0, 2), (0, 3), (1, 2), (1, 3)], "shared_memory")


def count_sent(actor):
    """Has an actor count the bytes that it sends to others; called in the actor."""
    send = actor._router.send
    actor.sent_bytes = 0

    def counted(message, arrays):
        actor.sent_bytes += sum(array.nbytes for array in arrays)
        send(message, arrays)

    actor._router.send = counted


def check_replicated_readers(mesh, copies):
    """Both processes of the second group read all of a large activation, of which so many copies are sent."""

    def step(weights, xs):
        def loss(x):
            return jnp.sum(mpmd.mark_stage_end(jnp.sin(x * weights[0]))[::7] * weights[1])

        return mpmd.treduce(loss, xs, mpmd.ForwardOnly(2, 2), operation=mpmd.Add)

    weights = [np.linspace(0, i, 1024, dtype=np.float32) for i in (1, 2)]
    xs = np.random.default_rng(0).normal(size=(2, 1024, 1024)).astype(np.float32)
    compiled = mpmd.jit(step, mesh, in_specs=P()).compile(weights, xs)
    ray.get([actor.__ray_call__.remote(count_sent) for actor in mesh.runtime.actors])
    np.testing.assert_allclose(compiled(weights, xs), jax.jit(step)(weights, xs), rtol=1e-5)
    counted = ray.get([a.__ray_call__.remote(lambda actor: actor.sent_bytes) for a in mesh.runtime.actors])
    assert counted == [count for group in compiled.report().groups for count in group.process_sent_bytes]
    assert counted == [copies * xs.nbytes // 2] * 2 + [0] * 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["network", "device", "object_store"])
def test_other_transports_carry_parts_as_well(local_ray, transport):
    with launch_processes(transport=transport) as mesh:
        assert_close(jitted(3, mesh)(*arguments()), jax.jit(evaluation(3))(*arguments()))
        check_replicated_readers(mesh, copies=1)


@pytest.mark.slow
def test_replicated_readers_are_each_sent_all_where_memory_is_shared(two_process_groups):
    check_replicated_readers(two_process_groups, copies=2)


def test_values_of_any_sharding_are_read_and_passed_on(two_process_groups):
    """Also small ones: a process has only a part of them, so they cannot come with its reply."""

    def step(state, xs):
        loss = mpmd.treduce(
            lambda x: jnp.sum(mpmd.mark_stage_end(x * state["large"][:2]) * state["small"]),
            xs,
            mpmd.ForwardOnly(2, 2),
            operation=mpmd.Add,
        )
        return jax.tree.map(lambda leaf: leaf + 1, state), loss

    rows = {"large": P("fsdp"), "small": P("fsdp"), "scalar": P()}
    state = {"large": np.arange(256, dtype="float32"), "small": np.ones(2, "float32"), "scalar": np.int32(3)}
    xs = np.ones((2, 2), np.float32)
    compiled = mpmd.jit(step, two_process_groups, in_specs=(rows, P()), donate_argnums=0)
    expected = jax.jit(step)(jax.jit(step)(state, xs)[0], xs)
    actual = compiled(compiled(state, xs)[0], xs)
    assert actual[0]["small"].spec == P("fsdp")
    assert_close(actual, expected)


@pytest.mark.slow
def test_a_failed_step_leaves_the_groups_usable(two_process_groups):
    """The second group waits for a message that does not come. Its processes leave the step together."""

    def failing(weights, xs, ys):
        # A loop carries 2 TiB, so they have to be there. Each array is one that XLA can compile.
        arrays = [jnp.zeros(2**31, jnp.complex64) + weights[0][0, 0] + i for i in range(128)]
        arrays = jax.lax.while_loop(lambda h: h[0][7].real < 0, lambda h: list(map(jnp.sin, h)), arrays)
        return evaluation(3)([weights[0] + sum(array[7].real for array in arrays), weights[1]], xs, ys)

    expected = jax.jit(evaluation(3))(*arguments())
    broken = mpmd.jit(failing, two_process_groups, in_specs=SPECS)
    working = jitted(3, two_process_groups)
    for _ in range(2):
        with pytest.raises(TaskError, match="failed on group 0"):
            float(broken(*arguments()))
        assert_close(working(*arguments()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_a_group_dies_with_any_of_its_processes(disposable_mesh, victim):
    """One that is in a collective, or that has done its part of the step."""
    mesh, process = disposable_mesh, disposable_mesh.processes[victim]
    result = jitted(FOREVER, mesh)(*arguments())
    wait_until_computing(mesh.processes[2])
    os.kill(process.pid, signal.SIGKILL)
    name = f"group {process.mpmd_idx}, process {process.rank} (died|is gone)"
    with pytest.raises(GroupDiedError, match=name) as caught:
        float(result)
    assert caught.value.mpmd_idx == process.mpmd_idx
    with pytest.raises(GroupDiedError, match=name):
        float(jitted(3, mesh)(*arguments()))
    pids = [other.pid for other in mesh.processes if other.mpmd_idx == process.mpmd_idx]
    await_that(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), SOON)


@pytest.mark.slow
@pytest.mark.parametrize("specs", [(P(), P(), P()), SPECS], ids=["load", "compile"])
def test_a_process_that_dies_while_its_group_compiles_is_named(disposable_mesh, specs):
    """With sharded arguments executables are compiled one by one, to learn what shardings XLA chooses."""
    victim = disposable_mesh.processes[1]
    os.kill(victim.pid, signal.SIGSTOP)
    step = mpmd.jit(evaluation(3), disposable_mesh, in_specs=specs)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiling = pool.submit(step.compile, *arguments())
        with pytest.raises(TimeoutError):
            compiling.result(timeout=5)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(GroupDiedError, match=r"group 0, process 1 (died|is gone)"):
            compiling.result(timeout=SOON)


@pytest.mark.slow
def test_a_stopped_process_is_found_by_the_time_out_of_a_collective(local_ray):
    environment = {"env_vars": {"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=2"}}
    with launch_processes(runtime_env=environment) as mesh:
        result = jitted(FOREVER, mesh)(*arguments())
        wait_until_computing(mesh.processes[2])
        os.kill(mesh.processes[3].pid, signal.SIGSTOP)
        with pytest.raises(GroupDiedError, match=r"group 1 has failed as a whole.*process 0.*Timed out"):
            float(result)
