"""What a plan has chosen, on Ray."""

import jax
import pytest

import cluster
import mpmd
from tests.support.parity import assert_close
from tests.support.planned_steps import CLUSTER, arguments, open_step


@pytest.mark.slow
def test_a_choice_runs_on_the_groups_that_it_launches(local_ray):
    args = arguments()
    choice = mpmd.plan(
        open_step, *args, cluster=CLUSTER, groups=2, submesh={"data": 2}, num_microbatches=4, simulate=1
    )
    first = jax.jit(open_step)(*args)
    second = jax.jit(open_step)(*first[:2], *args[2:])
    with cluster.launch(**choice.launch, cpus_per_group=0.5) as mesh:
        step = choice.jit(mesh)
        found = step(*args)
        assert_close(found[-1], first[-1])
        assert_close(step(*found[:2], *args[2:]), second)
