"""``MpmdArray`` is an array to JAX and to libraries: each call gives what it gives for jax arrays."""

import copy
import pickle

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from tests.support.parity import mesh_of


@pytest.fixture(scope="module", params=["whole", "in parts"])
def arrays(request):
    """The same pytree as ``MpmdArray``s on two groups, sharded there, and as jax arrays.

    In parts, ``w`` is one array of two, of which each group has two rows.
    """
    with mesh_of(2, data=2) as mesh:
        values = {
            "w": jnp.linspace(-1, 1, 16).reshape(4, 4),
            "v": jnp.arange(4, dtype=jnp.bfloat16),
            "scale": jnp.float32(3),
            "count": jnp.int32(7),
            "weak": jnp.asarray(2.5),
            "key": jax.random.key(3),
        }

        def step(values, xs):
            def row(x, w):
                return mpmd.mark_stage_end(x * w, num_stages=2), None

            def task(x):
                if request.param == "in parts":
                    return jax.lax.scan(row, x * values["scale"], values["w"])[0].sum()
                return jnp.sum(mpmd.mark_stage_end(x * values["scale"]) * values["w"])

            return values, mpmd.treduce(task, xs, schedule=mpmd.ForwardOnly(2, 2), operation=mpmd.Add)

        held, _ = mpmd.jit(
            step, mesh, in_specs=({**dict.fromkeys(values, jax.P()), "w": jax.P("data")}, None)
        )(values, jnp.ones((2, 4)))
        assert all(isinstance(leaf, mpmd.MpmdArray) for leaf in jax.tree.leaves(held))
        assert len(held["w"].parts) == (2 if request.param == "in parts" else 1)
        yield held, values


CALLS = {
    # JAX's functions.
    "jnp.where": lambda t: jnp.where(t["w"] > 0, t["w"], 0),
    "jax.lax.cond": lambda t: jax.lax.cond(t["scale"] > 0, jnp.sin, jnp.cos, t["w"]),
    "jax.jit": lambda t: jax.jit(lambda t: t["w"] * t["scale"] + t["v"])(t),
    "jax.jit of a closure": lambda t: jax.jit(lambda: t["w"] + 1)(),
    "jax.device_put to a device": lambda t: jax.device_put(t["w"], jax.devices()[1]),
    "jax.block_until_ready": lambda t: jax.block_until_ready(t),
    "isinstance": lambda t: [isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(t)],
    # Keys.
    "jax.random.key_data": lambda t: jax.random.key_data(t["key"]),
    "jax.jit of a key": lambda t: jax.jit(jax.random.uniform)(t["key"]),
    "jax.device_get": lambda t: jax.device_get(t),
    "copies of a key": lambda t: [pickle.loads(pickle.dumps(t["key"])), copy.deepcopy(t["key"])],
    "format of a key": lambda t: f"{t['key']}",
    # What arrays do.
    "arithmetic": lambda t: -t["w"] + 2 * t["w"] @ t["w"] / t["scale"] - 1,
    "promotion": lambda t: [t["v"] + 1.5, t["v"] * t["w"], t["count"] / 2, t["count"] + 1.5],
    "weak types": lambda t: [t["weak"] * t["v"], -t["weak"] + t["v"], t["weak"].reshape(1) * t["v"]],
    "arithmetic with numpy": lambda t: [np.ones((4, 4)) + t["w"], t["w"] + np.ones((4, 4))],
    "at": lambda t: t["w"].at[0].set(5.0),
    "methods": lambda t: [t["w"].T, t["w"].sum(0), t["w"].astype(jnp.int8), t["w"].reshape(2, 8)],
    "len": lambda t: (len(t["w"]), list(t["w"])),
    "numbers": lambda t: [float(t["scale"]), int(t["count"]), bool(t["count"]), list(range(t["count"]))],
    "format": lambda t: f"{t['scale']:.3f}",
    "copy": lambda t: [copy.deepcopy(t["w"]), copy.copy(t["w"]), t["w"].copy()],
    "pickle": lambda t: np.asarray(pickle.loads(pickle.dumps(t["w"]))),
    "numpy": lambda t: [np.asarray(t["w"]), np.mean(np.asarray(t["w"])), np.add(t["w"], t["w"])],
    "dlpack": lambda t: np.from_dlpack(t["w"]),
    "sizes": lambda t: [(x.shape, x.dtype, x.ndim, x.size, x.nbytes, x.itemsize) for x in (t["w"], t["v"])],
    "where": lambda t: [t["w"].sharding, t["w"].devices(), t["w"].is_fully_addressable],
    # Libraries.
    "eqx.partition": lambda t: eqx.combine(*eqx.partition(t, eqx.is_inexact_array)),
    "flax.serialization.from_bytes": lambda t: flax.serialization.from_bytes(
        {"w": t["w"]}, flax.serialization.to_bytes({"w": t["w"]})
    ),
}


def plain(leaf):
    """What can be compared with ``==``: of arrays the type, the kind and the bits."""
    if isinstance(leaf, mpmd.MpmdArray):
        leaf = leaf.value
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", plain(jax.random.key_data(leaf))
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        kind = "jax" if isinstance(leaf, jax.Array) else "numpy"
        return kind, leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()
    return leaf


@pytest.mark.usual(
    "whole-jnp.where",
    "whole-jax.lax.cond",
    "whole-jax.device_put to a device",
    "whole-jax.jit of a key",
    "whole-jax.device_get",
    "whole-copies of a key",
    "whole-weak types",
    "whole-len",
    "in parts-jax.jit of a closure",
    "in parts-jax.block_until_ready",
    "in parts-promotion",
    "in parts-format",
    "in parts-eqx.partition",
)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_it_gives_for_jax_arrays(arrays, name):
    held, values = arrays
    actual, expected = CALLS[name](held), CALLS[name](values)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert list(map(plain, jax.tree.leaves(actual))) == list(map(plain, jax.tree.leaves(expected)))


def test_what_jax_refuses_is_refused_with_jax_s_words(arrays):
    held, values = arrays
    for call in (
        lambda t: hash(t["w"]),
        lambda t: t["w"].__setitem__(0, 1),
        lambda t: bool(t["w"]),
        lambda t: len(t["scale"]),
        lambda t: t["w"].no_such_attribute,
        lambda t: np.asarray(t["key"]),
    ):
        with pytest.raises(Exception) as expected:
            call(values)
        with pytest.raises(expected.type):
            call(held)


def test_a_deleted_array_cannot_be_waited_for(mesh):
    array = mpmd.jit(lambda x: x + 1, mesh)(1.0)
    array.delete()
    with pytest.raises(RuntimeError, match="was donated to a step or deleted"):
        jax.block_until_ready(array)


def test_arguments_of_a_jitted_function_are_fetched_together(arrays, monkeypatch):
    """JAX asks for arrays of one type after the other; an array in parts is of another type."""
    held, _ = arrays
    asked = []
    start, read = mpmd.MpmdArray.copy_to_host_async, mpmd.MpmdArray.raw_value
    monkeypatch.setattr(
        mpmd.MpmdArray, "copy_to_host_async", lambda a: (asked.append(("ask", a)), start(a))[1]
    )
    monkeypatch.setattr(mpmd.MpmdArray, "raw_value", lambda a: (asked.append(("read", a)), read(a))[1])
    jax.jit(lambda t: t["w"] * t["scale"] + t["count"])(held)
    w, scalars = held["w"], [held["scale"], held["count"]]
    for together in ([w, *scalars],) if len(w.parts) == 1 else (w.parts, scalars):
        events = [event for event, array in asked if any(array is one for one in together)]
        assert events[: len(together)] == ["ask"] * len(together) and events.count("read") == len(together)


def test_looking_at_an_array_does_not_fetch_it(arrays, monkeypatch):
    held, _ = arrays
    monkeypatch.setattr(mpmd.MpmdArray, "raw_value", lambda array: pytest.fail("fetched"))
    for leaf in jax.tree.leaves(held):
        assert eqx.is_array(leaf)
        jax.eval_shape(lambda x: x, leaf)
        repr(leaf), leaf.sharding, leaf.nbytes, leaf.spec, leaf.mpmd_idxs, leaf.submesh
        hasattr(leaf, "no_such_attribute")
