"""Copies of values in host memory."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cluster.recovery import store as store_module
from cluster.recovery.journal import BEGINNING
from cluster.recovery.store import SnapshotStore, restore, save
from mpmd.runtime.lost_values import LostValue

SUBMESH = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def on(spec, array):
    return jax.device_put(array, NamedSharding(SUBMESH, spec))


@pytest.mark.parametrize(
    ("spec", "array", "num_shards"),
    [
        (P(), np.arange(6.0).reshape(2, 3), 1),
        (P("data"), np.arange(6.0).reshape(2, 3), 2),
        (P("data", "model"), np.arange(8).reshape(2, 4), 4),
        (P(), np.float32(np.nan), 1),
        (P(), np.zeros((0, 3)), 1),
        (P("model"), jnp.arange(4, dtype=jnp.bfloat16) / 3, 2),
    ],
    ids=str,
)
def test_values_come_back_bit_by_bit_and_where_they_were(spec, array, num_shards):
    value = on(spec, array)
    saved = save(value, SUBMESH, lambda nbytes: np.empty(nbytes, np.uint8))
    assert len(saved.shards) == num_shards
    assert saved.nbytes == value.nbytes
    back = restore(pickle.loads(pickle.dumps(saved, protocol=5)), SUBMESH)
    assert (back.sharding, back.dtype, back.shape) == (value.sharding, value.dtype, value.shape)
    assert np.asarray(back).tobytes() == np.asarray(value).tobytes()


def test_what_is_restored_shares_no_memory_with_the_copy():
    array = np.arange(64 * 1024, dtype="float32")
    saved = save(on(P(), array), SUBMESH, lambda nbytes: np.empty(nbytes, np.uint8))
    back = restore(saved, SUBMESH)
    saved.shards[0][1][:] = 7
    np.testing.assert_array_equal(back, array)


def values(*handles):
    return {handle: on(P("data"), np.full(8, handle, "float32")) for handle in handles}


def contents(store, number):
    """The first element of each value."""
    return {handle: restore(saved, SUBMESH)[0] for handle, saved in store.values(number).items()}


def transferred(source, store, number, base):
    for chunk in source.chunks(number, base):
        store.add(number, pickle.loads(pickle.dumps(chunk)))


def test_only_new_values_are_copied_and_travel():
    own, kept = SnapshotStore(), SnapshotStore()
    own.take(1, values(1, 2), SUBMESH)
    transferred(own, kept, 1, BEGINNING)
    own.keep_only(1)
    kept.keep_only(1)
    before = own.values(1)[2]
    own.take(2, values(2, 3), SUBMESH)
    assert own.values(2)[2] is before
    (chunk,) = own.chunks(2, 1)
    assert (set(chunk.values), chunk.handles) == ({3}, {2, 3})
    transferred(own, kept, 2, 1)
    assert contents(kept, 2) == {2: 2.0, 3: 3.0}
    assert contents(kept, 1) == {1: 1.0, 2: 2.0}  # until the other is committed
    assert contents(own, 1) == {1: 1.0, 2: 2.0}


def test_memory_is_used_again_and_what_is_not_is_given_back():
    store = SnapshotStore()
    memory = []
    for number in range(1, 6):
        store.keep_only(number - 1)
        store.take(number, values(number), SUBMESH)
        memory.append({data.ctypes.data for _, data in store.values(number)[number].shards})
    assert memory[0] == memory[2] == memory[4]
    assert memory[1] == memory[3] != memory[0]
    store.keep_only(5)
    store.take(6, {7: on(P(), np.zeros(100))}, SUBMESH)
    assert not store._free


def test_a_snapshot_that_is_given_up_leaves_nothing():
    own, kept = SnapshotStore(), SnapshotStore()
    own.take(1, values(1), SUBMESH)
    transferred(own, kept, 1, BEGINNING)
    own.take(2, values(1, 2), SUBMESH)
    kept.add(2, own.chunks(2, 1)[0]._replace(handles=None))  # the last part has not come
    for store in (own, kept):
        store.keep_only(1)
        assert set(store._values) == {1}
    kept.keep_only(BEGINNING)
    assert not kept._values


def test_large_snapshots_travel_in_parts(monkeypatch):
    monkeypatch.setattr(store_module, "_CHUNK_BYTES", 64)
    own, kept = SnapshotStore(), SnapshotStore()
    own.take(1, {**values(1, 2, 3), 4: on(P(), np.zeros(100, "float32"))}, SUBMESH)
    chunks = own.chunks(1, BEGINNING)
    assert [set(chunk.values) for chunk in chunks] == [{1, 2}, {3}, {4}]
    assert [chunk.handles for chunk in chunks] == [None, None, {1, 2, 3, 4}]
    transferred(own, kept, 1, BEGINNING)
    assert set(contents(kept, 1)) == {1, 2, 3, 4}


def test_lost_values_stay_lost():
    own, kept = SnapshotStore(), SnapshotStore()
    own.take(1, {1: LostValue("a task failed")}, SUBMESH)
    transferred(own, kept, 1, BEGINNING)
    assert kept.values(1) == {1: LostValue("a task failed")}


def test_a_snapshot_for_which_there_is_no_memory_leaves_nothing(monkeypatch):
    store = SnapshotStore()
    store.take(1, values(1), SUBMESH)
    allocate = store._allocate

    def failing(nbytes):
        if nbytes > 1000:
            raise MemoryError
        return allocate(nbytes)

    monkeypatch.setattr(store, "_allocate", failing)
    store.keep_only(1)
    with pytest.raises(MemoryError):
        store.take(2, {**values(1, 2), 3: on(P(), np.zeros(1000))}, SUBMESH)
    assert set(store._values) == {1}
    assert not store._free
    assert contents(store, 1) == {1: 1.0}
