"""The leaves that checkpoints can have, and errors that name others."""

import asyncio
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.parity import mesh_of

SCALARS = [
    np.float32(1.5),
    np.float64(1 / 3),
    np.int64(2**40),
    np.uint8(7),
    np.bool_(True),
    np.complex64(1j),
    ml_dtypes.bfloat16(1.5),
    2**40,
    1 / 3,
    True,
    1 + 2j,
    "text",
    None,
]


def test_scalars_come_back_as_they_were(tmp_path):
    mpmd.save(tmp_path / "saved", SCALARS)
    restored = mpmd.restore(tmp_path / "saved", SCALARS)
    assert restored == SCALARS
    assert [type(scalar) for scalar in restored] == [type(scalar) for scalar in SCALARS]


@pytest.mark.parametrize("tree", [{}, [], None], ids=repr)
def test_nothing_to_save(tree, tmp_path):
    with pytest.raises(ValueError, match="nothing to save: the pytree has no leaves"):
        mpmd.save(tmp_path / "saved", tree)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("tree", [{"a.b": 1, "a": {"b": 2}}, {"a.0": 1, "a": [2], "c": 3}], ids=repr)
def test_leaves_of_the_same_name(tree, tmp_path):
    with pytest.raises(ValueError, match=r"a\..* is the name of 2 leaves in a checkpoint"):
        mpmd.save(tmp_path / "saved", tree)
    assert not os.listdir(tmp_path)


def test_what_would_become_other_numbers_is_refused(tmp_path):
    mpmd.save(tmp_path / "saved", {"key": jax.random.key(3, impl="rbg"), "half": np.array([0.5])})
    other = {"key": jax.random.key(0, impl="unsafe_rbg"), "half": np.array([0])}
    said = r"(?s)half is float64\[1\] .* int64.*key is uint32\[4\] of keys of rbg in .* of keys of unsafe_rbg"
    with pytest.raises(ValueError, match=said):
        mpmd.restore(tmp_path / "saved", other)


def test_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is no directory, so nothing can be saved below it"):
        mpmd.save(tmp_path / "file/saved", {"a": 1})


def test_a_structure_without_leaves_is_saved(tmp_path):
    mpmd.save(tmp_path / "saved", {"a": {}, "b": None})
    assert mpmd.restore(tmp_path / "saved", {"a": {}, "b": None}) == {"a": {}, "b": None}


def test_all_leaves_that_cannot_be_saved_are_named(tmp_path):
    deleted = jnp.ones(3)
    deleted.delete()
    tree = {
        "function": {"of": len},
        "date": np.datetime64("2020"),
        "words": np.array(["a"]),
        "empty": [np.zeros((0, 3))],
        "deleted": deleted,
        "fine": 1,
    }
    with pytest.raises(ValueError) as caught:
        mpmd.save(tmp_path / "saved", tree)
    message = str(caught.value)
    assert (
        "function.of is of the type builtin_function_or_method; save arrays, numbers and strings" in message
    )
    assert "date is of the dtype datetime64[Y], which TensorStore does not store" in message
    assert "words is of the dtype <U1" in message
    assert "empty.0 has the shape (0, 3)" in message
    assert "deleted was deleted" in message
    assert "fine" not in message
    assert not os.listdir(tmp_path)


@pytest.fixture
def saved(tmp_path):
    tree = {"layer": {"w": jnp.ones((2, 3)), "b": np.ones(3)}, "count": 3, "name": "run", "none": None}
    mpmd.save(tmp_path / "saved", tree)
    return tmp_path / "saved", tree


def test_a_target_of_another_structure_and_other_shapes(saved):
    path, _ = saved
    target = {
        "layer": {"w": jax.ShapeDtypeStruct((2, 4), "float32"), "v": np.ones(3)},
        "count": np.zeros(2),
        "name": 1,
        "none": np.ones(3),
    }
    with pytest.raises(ValueError) as caught:
        mpmd.restore(path, target)
    assert str(caught.value).splitlines() == [
        f"the checkpoint {path} is of another state than the target:",
        "layer.v is not in the checkpoint",
        "layer.b is not in the target",
        "count is int64[] in the checkpoint, not float64[2]",
        "layer.w is float32[2, 3] in the checkpoint, not float32[2, 4]",
        "name is string in the checkpoint, not int64[]",
        "none is empty in the checkpoint, not float64[3]",
        "Give a target with the leaves of the checkpoint, and `...` for those that are not to be read; make "
        "anew what is not there",
    ]


def test_leaves_that_are_not_wanted(saved):
    path, tree = saved
    target = jax.tree.map(lambda leaf: ..., tree) | {"count": 0}
    assert mpmd.restore(path, target) == jax.tree.map(lambda leaf: ..., tree) | {"count": 3}


def test_arrays_of_few_bits(tmp_path):
    """TensorStore does not have all of these dtypes."""
    numbers = np.array([[0, 1, 1], [1, 0, 1]])
    dtypes = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3"]
    host = {dtype: numbers.astype(dtype) for dtype in dtypes}
    with mesh_of(1, data=2) as mesh:
        step = mpmd.jit(lambda x: x, mesh, in_shardings=P("data"))
        scalars = {dtype: array[0, 1] for dtype, array in host.items()}
        tree = {"groups": step(host), "jax": jax.tree.map(jnp.array, host), "numpy": host, "number": scalars}
        mpmd.save(tmp_path / "saved", tree)
        restored = mpmd.restore(tmp_path / "saved", tree)
        restored["again"] = step(restored["groups"])
        for dtype in dtypes:
            assert isinstance(restored["groups"][dtype], mpmd.MpmdArray)
            for name, arrays in restored.items():
                assert arrays[dtype].dtype == host[dtype].dtype
                expected = scalars[dtype] if name == "number" else host[dtype]
                np.testing.assert_array_equal(np.asarray(arrays[dtype]), expected)


def test_restoring_within_an_event_loop(saved):
    """As in a notebook."""
    path, tree = saved

    async def cell():
        return mpmd.restore(path, tree)

    assert asyncio.run(cell())["name"] == "run"


def test_sharded_arrays_and_keys_of_this_process(tmp_path):
    sharding = jax.sharding.NamedSharding(jax.make_mesh((4,), ("x",)), jax.P("x"))
    tree = {
        "sharded": jax.device_put(np.arange(8.0, dtype="float32"), sharding),
        "keys": jax.random.split(jax.random.key(3), 2),
        "scalar": jnp.float32(2),
    }
    mpmd.save(tmp_path / "saved", tree)
    restored = mpmd.restore(tmp_path / "saved", tree)
    assert restored["sharded"].sharding == sharding
    np.testing.assert_array_equal(restored["sharded"], tree["sharded"])
    np.testing.assert_array_equal(jax.random.key_data(restored["keys"]), jax.random.key_data(tree["keys"]))
    assert restored["scalar"] == 2
    assert re.fullmatch(r"key<\w+>", str(restored["keys"].dtype))
