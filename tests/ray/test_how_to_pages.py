"""The blocks of how-to pages that launch meshes."""

import functools

import numpy as np
import pytest

import mpmd
from tests.ray.conftest import PATIENCE
from tests.support.pages import blocks, run


@pytest.fixture
def small(local_ray, monkeypatch):
    """Meshes that other tests share have most of the cluster's CPUs."""
    launch = functools.partial(mpmd.launch, cpus_per_group=0.25, timeout=PATIENCE)
    monkeypatch.setattr(mpmd, "launch", launch)


@pytest.mark.slow
def test_the_script_of_one_node_computes_on_ray_what_plain_jax_computes(small):
    script, in_process, on_ray = blocks("how_to/one_node.md")
    names = run([script, in_process, on_ray])
    names["mesh"].close()
    np.testing.assert_allclose(names["ray_loss"], names["loss"], rtol=1e-5)


@pytest.mark.slow
def test_the_launch_of_several_nodes(small):
    (block,) = blocks("clusters.md")
    with run([block])["mesh"] as mesh:
        assert len(mesh.processes) == 4
