"""The blocks of pages that launch a mesh, on the tests' Ray."""

import functools

import numpy as np
import pytest

import mpmd
from tests.ray.conftest import PATIENCE
from tests.support import tutorial
from tests.support.pages import blocks, run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small(local_ray, monkeypatch):
    """Meshes that other tests share have most of the cluster's CPUs."""
    launch = functools.partial(mpmd.launch, cpus_per_group=0.25, timeout=PATIENCE)
    monkeypatch.setattr(mpmd, "launch", launch)


def test_the_launch_of_the_page_on_clusters():
    (block,) = blocks("clusters.md")
    with run([block])["mesh"] as mesh:
        assert len(mesh.processes) == 4


def test_the_block_of_the_tutorial_computes_what_plain_jax_computes(monkeypatch):
    cells = tutorial.CELLS
    definitions = cells[: next(i for i, cell in enumerate(cells) if "MpmdMesh" in cell)]
    names = tutorial.run([*definitions, tutorial.ON_RAY], monkeypatch)
    np.testing.assert_allclose(names["ray_losses"], names["plain_losses"][:5], rtol=1e-5)
