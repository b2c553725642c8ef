"""What waits, and for how long: steps under way, forks, and what a group says it is doing."""

import os
import threading

import jax
import numpy as np
import pytest

import mpmd
from tests.support.models import batch, init, make_step, mse, weights

SECONDS = 60


def mesh_of_two(**options):
    return mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage", **options)


def test_a_driver_that_reads_nothing_is_at_most_so_many_steps_ahead():
    """The groups are kept from running; then the call of a third step does not return."""
    with mesh_of_two(max_in_flight=2) as mesh:
        step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mpmd_mesh=mesh)
        step = step.compile(init(weights(2)), *batch())
        go, returned = threading.Event(), []
        for group in mesh.runtime._groups:
            group.submit(lambda: go.wait(SECONDS))

        def drive():
            for _ in range(4):
                returned.append(step(init(weights(2)), *batch()))

        driver = threading.Thread(target=drive)
        driver.start()
        driver.join(1)
        assert len(returned) == 2
        go.set()
        driver.join(SECONDS)
        assert len(returned) == 4


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_fork_is_told_that_it_has_no_groups():
    with mesh_of_two() as mesh:
        step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mpmd_mesh=mesh)
        step = step.compile(init(weights(2)), *batch())
        result, _ = step(init(weights(2)), *batch())
        read, write = os.pipe()
        if not (child := os.fork()):
            for use in (lambda: step(init(weights(2)), *batch()), lambda: jax.tree.map(np.asarray, result)):
                try:
                    use()
                except RuntimeError as error:
                    os.write(write, str(error).encode() + b"\n")
            mesh.close()
            os.write(write, b"closed\n")
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            said = lines.read().splitlines()
        os.waitpid(child, 0)
        assert [f"is a fork of process {os.getpid()}" in line for line in said] == [True, True, False]
        assert said[2] == "closed"
        jax.tree.map(np.asarray, result)
