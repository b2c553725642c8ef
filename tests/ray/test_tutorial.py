"""The block of the tutorial that runs on Ray."""

import functools

import numpy as np
import pytest

import mpmd
from tests.ray.conftest import PATIENCE
from tests.support.tutorial import CELLS, ON_RAY, run


@pytest.mark.slow
def test_the_block_on_ray_computes_what_plain_jax_computes(local_ray, monkeypatch):
    # Meshes that other tests share have most of the cluster's CPUs.
    launch = functools.partial(mpmd.launch, cpus_per_group=0.25, timeout=PATIENCE)
    monkeypatch.setattr(mpmd, "launch", launch)
    definitions = CELLS[: next(i for i, cell in enumerate(CELLS) if "MpmdMesh" in cell)]
    names = run([*definitions, ON_RAY], monkeypatch)
    np.testing.assert_allclose(names["ray_losses"], names["plain_losses"][:5], rtol=1e-5)
