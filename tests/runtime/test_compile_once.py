"""In one process XLA compiles an executable once, for all groups that share it."""

import collections
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.compat import compiled_for
from mpmd.ir.plan import Aval, Executable
from mpmd.runtime import compile_once
from mpmd.runtime.compile_once import CompileOnce
from mpmd.runtime.compiling import compile_executable
from tests.support.models import batch, shrink, weights
from tests.support.parity import assert_close, mesh_of

STAGES = 4
ROWS = Aval((4, 2), "float32", 4)


@pytest.fixture
def cache_on_disk():
    """Has JAX's persistent cache be in a directory, or nowhere; afterwards as the other tests have it."""
    configured = jax.config.jax_compilation_cache_dir

    def use(directory):
        jax.config.update("jax_compilation_cache_dir", directory)
        compilation_cache.reset_cache()
        jax.clear_caches()

    yield use
    use(configured)


@pytest.fixture
def compiled(monkeypatch):
    """How often each executable was compiled."""
    names = collections.Counter()

    def counted(executable, *rest):
        names[executable.name] += 1
        return compile_executable(executable, *rest)

    monkeypatch.setattr(compile_once, "compile_executable", counted)
    return names


def executables_of_groups(plan):
    return sum(len(plan.executables_of(i)) for i in range(STAGES))


def step_and_arguments():
    return shrink, (weights(STAGES), *batch())


def test_groups_share_what_is_compiled_and_compute_the_same(compiled, cache_on_disk):
    cache_on_disk(None)
    step, args = step_and_arguments()
    with mesh_of(STAGES) as mesh:
        loaded = mpmd.jit(step, mesh).compile(*args)
        plan = loaded.plan
        assert compiled == {executable.name: 1 for executable in plan.executables}
        assert executables_of_groups(plan) > len(plan.executables)
        assert_close(loaded(*args), jax.jit(step)(*args))


@pytest.mark.slow
def test_groups_share_nothing_that_the_persistent_cache_may_have(compiled, cache_on_disk, tmp_path):
    cache_on_disk(str(tmp_path))
    step, args = step_and_arguments()
    for _ in range(2):  # the second time all comes from the cache
        jax.clear_caches()
        with mesh_of(STAGES) as mesh:
            loaded = mpmd.jit(step, mesh).compile(*args)
            assert_close(loaded(*args), jax.jit(step)(*args))
    assert compiled.total() == 2 * executables_of_groups(loaded.plan)
    assert [*tmp_path.iterdir()]


def test_a_callback_whose_result_is_read_is_compiled_for_each_group(compiled, cache_on_disk):
    cache_on_disk(None)

    def forward(params, x):
        for number, layer in enumerate(params):
            x = jax.pure_callback(np.sin, x, x @ layer["w"])
            x = mpmd.mark_stage_end(x) if number < STAGES - 1 else x
        return x

    def evaluate(params, xs, ys):
        schedule = mpmd.ForwardOnly(STAGES, STAGES)
        return mpmd.treduce(lambda mb: forward(params, mb[0]).sum(), (xs, ys), schedule, operation=mpmd.Add)

    args = (weights(STAGES), *batch())
    with mesh_of(STAGES) as mesh:
        loaded = mpmd.jit(evaluate, mesh).compile(*args)
        value = float(loaded(*args))
    assert compiled.total() == executables_of_groups(loaded.plan)
    np.testing.assert_allclose(value, jax.jit(evaluate)(*args), rtol=1e-5)


def submesh(*numbers):
    return jax.sharding.Mesh([jax.devices()[i] for i in numbers], ("data",))


def test_an_executable_of_several_devices_is_loaded_for_others(cache_on_disk):
    cache_on_disk(None)
    here, there = submesh(0, 1), submesh(5, 3)
    executable = Executable("rows", (ROWS, ROWS), (ROWS,), (0,), (("data",), ()), (("data",),))
    original = compile_executable(executable, lambda x, y: (x @ (x.T @ y),), here)
    moved = compiled_for(original, [*here.devices.flat], [*there.devices.flat])
    assert moved.output_shardings[0] == jax.sharding.NamedSharding(there, P("data"))
    assert moved.memory_analysis().alias_size_in_bytes == original.memory_analysis().alias_size_in_bytes > 0
    rows = jnp.arange(8.0).reshape(4, 2)

    def results(call, mesh):
        x, y = (jax.device_put(rows, jax.sharding.NamedSharding(mesh, P(*spec))) for spec in (("data",), ()))
        (result,) = call(x, y)
        assert x.is_deleted() and result.sharding.mesh == mesh
        return [np.asarray(shard.data) for shard in result.addressable_shards]

    np.testing.assert_array_equal(results(moved, there), results(original, here))


def test_groups_that_wait_for_a_compilation_get_its_error(compiled):
    executable = Executable("wrong", (ROWS,), (ROWS,), (), ((),), ((),))

    def wrong(x):
        raise ZeroDivisionError("of the function")

    compile = CompileOnce()
    for mesh in (submesh(0), submesh(1)):
        with pytest.raises(ZeroDivisionError, match="of the function"):
            compile(executable, wrong, mesh, nullcontext)
    assert compiled == {"wrong": 1}
