"""The blocks of ``docs/several_models.md`` run, and compute what plain JAX computes."""

import jax
import pytest

from tests.support.pages import blocks, run
from tests.support.parity import assert_close


@pytest.fixture(scope="module")
def page():
    """The names of the page, of which the mesh is open."""
    names = run(blocks("several_models.md"))
    with names["mesh"]:
        yield names


def test_trainer_and_sampler_compute_what_plain_jax_computes(page):
    train, sample = jax.jit(page["train_step"]), jax.jit(page["sample_step"])
    params = weights = {"first": jax.numpy.eye(4), "last": jax.numpy.eye(4) / 2}
    drawn = sample(weights, page["x"])
    for _ in range(4):
        batch, drawn = drawn, sample(weights, page["x"])
        params, loss = train(params, batch, page["y"])
        weights = params
    assert_close((page["params"], page["weights"], page["loss"]), (params, weights, loss))
    assert page["distance"] == 0
    assert page["weights"]["first"].mpmd_idxs == (2,)
    with pytest.raises(ValueError, match=r"mpmd\.reshard"):
        page["sample"](page["params"], page["x"])
