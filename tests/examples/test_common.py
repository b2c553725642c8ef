"""``assert_close`` of the examples: passes rounding, fails for one wrong leaf however small, and names it."""

import jax.numpy as jnp
import numpy as np
import pytest

LIMIT = 1e-5
EXPECTED = {
    "w": np.linspace(1, 2, 6, dtype=np.float32),
    "moments": [np.full(4, 1e-6, np.float32), np.zeros(2, np.float32)],
    "half": np.arange(4).astype(jnp.bfloat16),
    "count": np.int32(1_000_000),
}


@pytest.fixture
def common(example):
    return example("common")


def test_rounding_passes(common, capsys):
    common.assert_close("state", EXPECTED | {"w": EXPECTED["w"] * np.float32(1 + 1e-6)}, EXPECTED, LIMIT)
    assert capsys.readouterr().out.startswith("state: largest relative error of a leaf ")
    common.assert_close("loss", 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("changed", "leaf"),
    [
        ({"moments": [EXPECTED["moments"][0] * np.float32(1.001), EXPECTED["moments"][1]]}, "['moments'][0]"),
        ({"moments": [EXPECTED["moments"][0], np.float32([0, 1e-30])]}, "['moments'][1]"),
        ({"half": np.array([0, 1.0078125, 2, 3], jnp.bfloat16)}, "['half']"),
        ({"count": np.int32(1_000_001)}, "['count']"),
        ({"w": np.full(6, np.nan, np.float32), "count": np.int32(0)}, "['w']"),
        ({"w": EXPECTED["w"].astype(np.float64)}, "['w'] is float64"),
        ({"w": EXPECTED["w"][:1]}, "['w'] is float32(1,), not float32(6,)"),
        ({"extra": np.ones(1)}, "the structure is"),
    ],
)
def test_a_wrong_leaf_is_named(common, changed, leaf):
    with pytest.raises(AssertionError) as error:
        common.assert_close("state", EXPECTED | changed, EXPECTED, LIMIT)
    assert leaf in str(error.value)
