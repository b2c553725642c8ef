"""The block of the page on clusters launches its mesh."""

import functools

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
def test_the_launch_of_the_page(small):
    (block,) = blocks("clusters.md")
    with run([block])["mesh"] as mesh:
        assert len(mesh.processes) == 4
