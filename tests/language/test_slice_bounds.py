"""The bounds of slices of equal work, and arrays cut at them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpmd
from tests.support.effort import costly


def work(position, length, attention):
    """The share of the work of a sequence that its tokens before a position take."""
    share = position / length
    return (1 - attention) * share + attention * share**2


sizes = st.tuples(st.integers(1, 10_000), st.integers(1, 64), st.sampled_from([1, 2, 8, 128])).filter(
    lambda size: size[0] // size[2] >= size[1]
)


@given(sizes, st.floats(0, 1))
def test_slices_cover_the_sequence_in_order(size, attention):
    length, slices, multiple = size
    bounds = mpmd.slice_bounds(length, slices, attention_share=attention, multiple=multiple)
    assert len(bounds) == slices + 1 and bounds[0] == 0 and bounds[-1] == length
    assert all(b - a >= multiple for a, b in itertools.pairwise(bounds))
    assert all(bound % multiple == 0 for bound in bounds[:-1])


@given(sizes, st.floats(0, 1))
def test_slices_have_equal_work(size, attention):
    """Each bound is within half a unit of that of equal work, where that leaves each slice a unit."""
    length, slices, multiple = size
    bounds = mpmd.slice_bounds(length, slices, attention_share=attention, multiple=multiple)
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    if min(lengths) > multiple:
        for k, bound in enumerate(bounds[1:-1], 1):
            least, most = (work(bound + sign * 0.5001 * multiple, length, attention) for sign in (-1, 1))
            assert least <= k / slices <= most


def test_slices_get_shorter_with_attention():
    bounds = mpmd.slice_bounds(1000, 8, attention_share=0.5)
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 207 and lengths[-1] == 86
    assert mpmd.slice_bounds(8192, 4, attention_share=0.5) == (0, 2998, 5063, 6741, 8192)
    assert mpmd.slice_bounds(8192, 4, attention_share=0.5, multiple=128) == (0, 2944, 5120, 6784, 8192)


def test_a_slice_keeps_a_token():
    assert mpmd.slice_bounds(5, 4, attention_share=1.0) == (0, 2, 3, 4, 5)
    assert mpmd.slice_bounds(np.int64(4), 4) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3, 4), {}, ValueError, "^3 tokens cannot be cut into 4 slices: each slice needs a token at least"),
        ((500, 4), {"multiple": 128}, ValueError, "each slice needs a multiple of 128 tokens at least"),
        ((0, 0), {}, ValueError, "(?s)length must .*slices must be a whole number of at least 1, not 0"),
    ],
)
def test_bounds_that_cannot_be(arguments, options, error, message):
    with pytest.raises(error, match=message):
        mpmd.slice_bounds(*arguments, **options)


@costly
@given(st.data())
def test_slices_are_the_arrays_in_pieces(data):
    axis = data.draw(st.integers(-3, 2))
    shape = data.draw(st.tuples(*[st.integers(1, 12)] * 3))
    count = data.draw(st.integers(1, shape[axis]))
    bounds = mpmd.slice_bounds(shape[axis], count, attention_share=data.draw(st.floats(0, 1)))
    array = np.arange(np.prod(shape)).reshape(shape)
    pieces = mpmd.slices({"numpy": array, "jax": jnp.asarray(array)}, bounds, axis)
    assert [piece["numpy"].shape[axis] for piece in pieces] == list(np.diff(bounds))
    for name in ("numpy", "jax"):
        np.testing.assert_array_equal(np.concatenate([piece[name] for piece in pieces], axis), array)
    assert all(np.shares_memory(piece["numpy"], array) for piece in pieces)


def test_slices_of_keys_and_under_jit():
    keys = jax.random.split(jax.random.key(0), (2, 6))
    first, second = jax.jit(lambda tree: mpmd.slices(tree, (0, 4, 6)))(keys)
    assert jnp.all(first == keys[:, :4]) and jnp.all(second == keys[:, 4:])


@pytest.mark.parametrize(
    ("tree", "bounds", "axis", "error", "message"),
    [
        (
            np.zeros((2, 7)),
            (0, 4, 8),
            1,
            ValueError,
            r"^tree has shape \(2, 7\): bounds that end at 8 need 8",
        ),
        (
            {"x": np.zeros((2, 8)), "y": np.zeros(2)},
            (0, 8),
            1,
            ValueError,
            r"tree\['y'\] has shape \(2,\): there is no axis 1",
        ),
        (np.zeros((2, 8)), (1, 8), 1, ValueError, r"bounds must be two or more ascending .*not \(1, 8\)"),
        (np.zeros((2, 8)), (0, 4, 4, 8), 1, ValueError, "bounds must be two or more ascending"),
        (np.zeros((2, 8)), (0,), 1, ValueError, "bounds must be two or more ascending"),
        (np.zeros((2, 8)), (0, 4.0, 8), 1, TypeError, r"bounds\[1\] must be a whole number"),
        ((), (0, 8), 1, ValueError, "the tree has no array"),
        ([1, 2], (0, 8), 1, TypeError, r"tree\[0\] is of type int, tree\[1\] is of type int: only arrays"),
    ],
)
def test_trees_that_cannot_be_cut(tree, bounds, axis, error, message):
    with pytest.raises(error, match=message):
        mpmd.slices(tree, bounds, axis)
