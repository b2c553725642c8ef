"""What storage changes or loses is noticed when it is restored, and the error names a whole checkpoint."""

import gc
import os
import random
import re
import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.runtime import storage
from tests.support.checkpoint_state import save_plain
from tests.support.digests import digests
from tests.support.parity import mesh_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SHAPE = (64, 16)


@pytest.fixture(autouse=True)
def collected():
    """When Orbax cannot read an array, it leaves coroutines of the others behind, which warn when they go."""
    yield
    gc.collect()


def scaled(weights, xs, num_groups=2):
    """The weights, of which each of two groups has one, and shards it."""

    def stages(x):
        x = mpmd.mark_stage_end(x * weights["first"].sum())
        return mpmd.mark_stage_end(x * weights["second"].sum())

    schedule = mpmd.Interleaved1F1B(2, num_groups) if num_groups == 1 else mpmd.ForwardOnly(2, num_groups)
    return weights, mpmd.treduce(stages, xs, schedule, operation=mpmd.Add)


def numbers(seed):
    return np.random.default_rng(seed).standard_normal(SHAPE, "float32")


@pytest.fixture(scope="module")
def step():
    weights = {"first": numbers(1), "second": numbers(2)}
    with mesh_of(2, fsdp=2) as mesh:
        jitted = mpmd.jit(scaled, mesh, in_shardings=(P("fsdp"), P()))
        yield jitted.compile(weights, np.ones((2, 3), "float32"))


@pytest.fixture(scope="module")
def state(step):
    """Arrays on groups, and in this process."""
    weights, _ = step({"first": numbers(1), "second": numbers(2)}, np.ones((2, 3), "float32"))
    return {"groups": weights, "jax": jnp.asarray(numbers(3)), "numpy": numbers(4), "count": 3, "name": "run"}


@pytest.fixture(scope="module")
def target(step, state):
    return state | {"groups": step.argument_leaves()}


@pytest.fixture(scope="module")
def saved_once(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "saved"
    mpmd.save(path, state)
    return path


@pytest.fixture
def saved(saved_once, tmp_path):
    """A checkpoint of the state, which a test may damage."""
    return shutil.copytree(saved_once, tmp_path / "saved")


@pytest.fixture
def restored(step, target):
    """Restores a checkpoint, each group its shards."""
    return lambda path: mpmd.restore(path, target, step.mesh)


def chunks(path):
    return [file for file in sorted(path.glob("ocdbt.process_*/d/*")) if file.stat().st_size > 2**10]


def with_flipped_bit(content, position):
    flipped = bytearray(content)
    flipped[position // 8] ^= 1 << position % 8
    return bytes(flipped)


@pytest.mark.parametrize("flips", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_flipped_bits_of_chunks_are_never_restored(state, restored, saved, flips):
    """Some are in what nothing refers to any more."""
    draw, expected, named = random.Random(0), digests(mpmd.to_host(state)), set()
    files = chunks(saved)
    assert {file.parents[1].name for file in files} >= {
        "ocdbt.process_g0p0",
        "ocdbt.process_g1p0",
        "ocdbt.process_driver",
        "ocdbt.process_0",
    }
    for file in files:
        content = file.read_bytes()
        for _ in range(flips):
            file.write_bytes(with_flipped_bit(content, draw.randrange(8 * len(content))))
            try:
                assert digests(mpmd.to_host(restored(saved))) == expected
            except mpmd.DamagedCheckpointError as error:
                named.update(re.findall(r"read ([\w.]+): DATA_LOSS", str(error)))
        file.write_bytes(content)
    assert named == {"groups.first", "groups.second", "jax", "numpy"}


def test_flipped_bits_where_an_index_begins_are_damage(restored, saved):
    """There it says how it is compressed, which no checksum covers for its reader."""
    (index,) = (saved / "d").iterdir()
    content = index.read_bytes()
    for byte in (12, 15, 19):
        index.write_bytes(with_flipped_bit(content, 8 * byte + 3))
        with pytest.raises(mpmd.DamagedCheckpointError, match="cannot read"):
            restored(saved)


def test_a_group_names_the_array_that_it_cannot_read(restored, saved):
    (file,) = [file for file in chunks(saved) if "g1p0" in str(file)]
    file.write_bytes(with_flipped_bit(file.read_bytes(), 8 * 500))
    with pytest.raises(mpmd.DamagedCheckpointError) as caught:
        restored(saved)
    assert caught.value.mpmd_idx == 1
    assert re.search(
        r"group 1 could not read groups\.second: DATA_LOSS: .*Digest mismatch", str(caught.value)
    )
    assert "tensorstore_spec" not in str(caught.value)


def emptied(file):
    os.truncate(file, 0)


def truncated(file):
    os.truncate(file, file.stat().st_size // 2)


def flipped(file):
    file.write_bytes(with_flipped_bit(file.read_bytes(), file.stat().st_size * 4))


def grown(file):
    file.write_bytes(file.read_bytes() + b"\0")


@pytest.mark.usual("grown", "remove")
@pytest.mark.parametrize("damage", [emptied, truncated, grown, flipped, os.remove])
def test_every_file_that_is_damaged_is_named(damage, restored, saved):
    """But for those that are of no use once a checkpoint has its name."""
    of_committing = {"_CHECKPOINT_METADATA", "commit_success.txt"}
    files = [file for file in saved.rglob("*") if file.is_file()]
    for file in files:
        if file.name in of_committing or (damage is flipped and file.parent.name == "d"):
            continue
        if file.name == "mpmd_files" and damage is os.remove:
            continue  # as before there was one
        content = file.read_bytes()
        damage(file)
        with pytest.raises(mpmd.DamagedCheckpointError, match=re.escape(str(file))):
            restored(saved)
        file.write_bytes(content)
    restored(saved)


def test_damaged_files_of_a_checkpoint_without_a_record(tmp_path):
    """As of plain Orbax, after a loss of power."""
    path, tree = tmp_path / "plain", {"weight": jnp.ones(3)}
    save_plain(path, tree)
    np.testing.assert_array_equal(mpmd.restore(path, tree)["weight"], 1)
    for damage, name, fault in [
        (truncated, "_METADATA", "is not JSON"),
        (emptied, "array_metadatas/process_0", "is empty"),
        (emptied, "manifest.ocdbt", "is empty"),
        (emptied, "_METADATA", "is empty"),
    ]:
        damage(path / name)
        with pytest.raises(mpmd.DamagedCheckpointError, match=f"{path}/{name} {fault}"):
            mpmd.restore(path, tree)


def test_the_last_whole_checkpoint_beside_it_is_named(tmp_path):
    tree = {"weight": np.ones(3)}
    for name in ("9", "10", "11", "latest", "run12", "13.orbax-checkpoint-tmp"):
        mpmd.save(tmp_path / name, tree)

    def last_whole():
        with pytest.raises(mpmd.DamagedCheckpointError) as caught:
            mpmd.restore(tmp_path / "11", tree)
        assert caught.value.last_whole is None or f"is {caught.value.last_whole}: restore" in str(
            caught.value
        )
        return caught.value.last_whole

    os.remove(tmp_path / "11/_METADATA")
    assert last_whole() == str(tmp_path / "10")
    emptied(tmp_path / "10/manifest.ocdbt")
    assert last_whole() == str(tmp_path / "9")
    os.remove(tmp_path / "9/_METADATA")
    assert last_whole() is None


def test_a_checkpoint_with_the_name_of_directories_of_chunks(tmp_path):
    mpmd.save(tmp_path / "d", {"weight": np.ones(3)})
    assert mpmd.restore(tmp_path / "d", {"weight": np.ones(3)})["weight"].tolist() == [1, 1, 1]


def test_the_items_of_a_manager(tmp_path):
    tree = {"weight": np.ones(3)}
    with ocp.CheckpointManager(tmp_path, item_handlers=mpmd.checkpoint.handler()) as manager:
        for number in (1, 2):
            manager.save(number, args=ocp.args.PyTreeSave(tree))
        manager.wait_until_finished()
        truncated(tmp_path / "2/default/_METADATA")
        emptied(tmp_path / "2/_CHECKPOINT_METADATA")
        with pytest.raises(mpmd.DamagedCheckpointError) as caught:
            manager.restore(2, args=mpmd.checkpoint.restore_args(tree))
        assert caught.value.last_whole == str(tmp_path / "1/default")
        restored = manager.restore(1, args=mpmd.checkpoint.restore_args(tree))
    np.testing.assert_array_equal(restored["weight"], 1)


def test_a_directory_of_a_manager_is_no_checkpoint(tmp_path):
    with pytest.raises(
        mpmd.DamagedCheckpointError, match=r"_METADATA is missing; a manager has .* 100/default"
    ):
        mpmd.restore(tmp_path, {"weight": np.ones(3)})


def test_storage_that_a_group_does_not_share_is_no_damage(restored, saved, monkeypatch):
    """The driver has just seen all files."""

    def read(stored, submesh):
        raise ValueError('NOT_FOUND: Metadata at "groups.first/zarr.json" does not exist')

    monkeypatch.setattr(storage, "read", read)
    with pytest.raises(
        mpmd.CheckpointError, match=r"group \d could not read its part of .*NOT_FOUND"
    ) as caught:
        restored(saved)
    assert not isinstance(caught.value, mpmd.DamagedCheckpointError)
