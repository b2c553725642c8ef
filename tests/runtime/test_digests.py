"""Digests of values by device, and copies of values that are to be equal."""

import types
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.errors import GroupDiedError, SilentCorruptionError
from mpmd.meshes.part import WholeMesh
from mpmd.runtime.digests import ProcessDigests, ShardDigest, ValueDigest, digests_by_device
from mpmd.runtime.replicas import unequal_replicas


def process(mpmd_idx, digests, is_received=False, kind=("cpu",), rank=0):
    """A process whose devices have these digests of one value."""
    shards = tuple(ShardDigest(f"cpu:{i}", ((0, 4),), digest) for i, digest in enumerate(digests))
    return ProcessDigests(mpmd_idx, rank, "here", kind, {7: ValueDigest("float32[4]", shards, is_received)})


def holders(*processes):
    return [each.holders for each in unequal_replicas(processes)]


def test_equal_copies_are_no_finding():
    assert holders(process(0, [1, 1]), process(1, [1, 1], is_received=True)) == []


def test_the_devices_with_equal_bits_are_named_together():
    (found,) = unequal_replicas([process(0, [1, 1]), process(1, [2], is_received=True)])
    assert found.mpmd_idxs == (0, 1)
    assert str(found) == (
        "copies of a float32[4] differ: cpu:0 of group 0 (here), cpu:1 of group 0 (here); "
        "cpu:0 of group 1 (here)"
    )


def test_copies_that_groups_have_computed_themselves_may_differ():
    assert holders(process(0, [1, 1]), process(1, [2, 2])) == []
    assert holders(process(0, [1, 1]), process(1, [2, 3])) == [
        ("cpu:0 of group 1 (here)", "cpu:1 of group 1 (here)")
    ]


@pytest.mark.parametrize(("kind", "is_conclusive"), [("cpu", True), ("another cpu", False)])
def test_processes_of_other_kinds_may_compute_other_bits(kind, is_conclusive):
    (found,) = unequal_replicas([process(0, [1]), process(0, [2], kind=(kind,), rank=1)])
    assert found.is_conclusive == is_conclusive


class PretendedMesh(WholeMesh):
    """Groups whose processes have these digests. Group 1, which is left out, is dead if it has none."""

    abstract_submeshes, mpmd_dim, runtime = (), 0, None

    def __init__(self, mpmd_dim, *processes):
        super().__init__(None)
        self.mpmd_dim = mpmd_dim
        self.runtime = types.SimpleNamespace(
            ask=self.ask, processes_per_group=(1,) * mpmd_dim, left_out=frozenset([1])
        )
        self.processes = processes

    def ask(self, requests):
        futures = {mpmd_idx: Future() for mpmd_idx in requests}
        for mpmd_idx, future in futures.items():
            if taken := tuple(each for each in self.processes if each.mpmd_idx == mpmd_idx):
                future.set_result(taken)
            else:
                future.set_exception(GroupDiedError("it died", mpmd_idx))
        return futures


def test_a_comparison_says_what_is_inconclusive_and_who_is_left_out():
    other = process(0, [2], kind=("another cpu",), rank=1)
    with pytest.warns(RuntimeWarning, match=r"inconclusive: copies of 1 values differ on group 0.*NPROC"):
        PretendedMesh(1, process(0, [1]), other).verify_replicas()
    with pytest.warns(RuntimeWarning, match=r"group 1 is left out, which has died; mesh\.replace"):
        PretendedMesh(2, process(0, [1, 1])).verify_replicas()


def test_every_device_has_a_digest_of_its_own():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    sharded = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))
    replicated = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P()))
    first, second = digests_by_device([sharded, replicated]).values()
    assert first != second
    first, second = digests_by_device([replicated]).values()
    assert first == second
    (host,) = digests_by_device([np.arange(8.0, dtype=np.float32)]).values()
    assert host == first
    assert digests_by_device([jnp.bfloat16(1.5)]) != digests_by_device([jnp.bfloat16(1.25)])


@pytest.fixture
def mesh():
    with mpmd.MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage") as mesh:
        yield mesh


def test_replicas_of_a_mesh_in_one_process(mesh):
    """A device of a group has another bit of a value than the other device."""
    doubled = mpmd.jit(lambda x: x * 2, mesh)(np.ones((4, 4), np.float32))
    mesh.verify_replicas()
    values = mesh.runtime._groups[0].worker._values
    handle, array = max((h, value) for h, value in values.items() if value.shape == (4, 4))
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    shards[1].view(np.uint32).flat[3] ^= 1
    placed = [
        jax.device_put(data, s.device) for data, s in zip(shards, array.addressable_shards, strict=True)
    ]
    values[handle] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)
    with pytest.raises(SilentCorruptionError, match=r"float32\[4,4\] differ: .*group 0") as raised:
        mesh.verify_replicas()
    assert raised.value.mpmd_idxs == (0,)
    del doubled


def test_a_tied_weight_of_two_groups(mesh):
    """Both stages read one weight; the group that is sent the new one has the same bits."""

    def loss_of(weight, x):
        return ((mpmd.mark_stage_end(jnp.tanh(x @ weight)) @ weight) ** 2).mean()

    def step(weight, xs):
        loss, grad = mpmd.treduce(
            lambda x: jax.value_and_grad(loss_of)(weight, x), xs, mpmd.Std1F1B(2), operation=mpmd.Mean
        )
        return weight - 0.1 * grad, loss

    weight, _ = mpmd.jit(step, mesh)(np.eye(4, dtype=np.float32), np.ones((4, 2, 4), np.float32))
    assert weight.mpmd_idxs == (0, 1)
    mesh.verify_replicas()
    workers = [group.worker for group in mesh.runtime._groups]
    (shared,) = [h for h in workers[0]._values.keys() & workers[1]._values if h in _received(workers)]
    workers[1]._values[shared] = workers[1]._values[shared] + 1
    with pytest.raises(SilentCorruptionError, match=r"group 0 .*group 1"):
        mesh.verify_replicas()


def _received(workers):
    """The handles of (4, 4) values that one group has computed and the other one received."""
    one, other = (worker._received for worker in workers)
    return {h for h in one ^ other if any(h in w._values and w._values[h].shape == (4, 4) for w in workers)}
