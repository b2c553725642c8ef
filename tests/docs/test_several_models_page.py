"""The blocks of ``docs/several_models.md`` run, and compute what plain JAX computes."""

import jax
import pytest

import mpmd
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


def test_the_numbers_of_groups(page):
    assert str(page["sample"].report()).startswith("part 'sampler': its group 0 is group 2 of the mesh")
    assert page["mesh"].parts == {"trainer": range(2), "sampler": range(2, 3)}


def test_a_copy_in_another_dtype_goes_in_half_of_the_bytes(page):
    copy = mpmd.reshard(page["params"], to=page["mesh"].part("sampler"), dtype=jax.numpy.bfloat16)
    assert all(array.dtype == jax.numpy.bfloat16 for array in jax.tree.leaves(copy))
    assert sum(array.nbytes for array in jax.tree.leaves(copy)) == 4 * 4 * 2 * 2
