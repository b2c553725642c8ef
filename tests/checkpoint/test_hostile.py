"""Checkpoints of somebody who means harm, and saves whose files vanish meanwhile, are errors that say so."""

import hashlib
import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import mpmd
from mpmd.checkpoint import integrity

TREE = {"weight": np.arange(6.0), "jax": jnp.ones(3), "name": "run"}
NESTED = '{"a":' * 1000 + "1" + "}" * 1000


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "whole"
    mpmd.save(path, TREE)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def write_record(path, text):
    content = text.encode()
    (path / "mpmd_files").write_bytes(hashlib.sha256(content).hexdigest().encode() + b" " + content)


def replace(path, name, text):
    """Writes a file, and the record to it."""
    (path / name).write_text(text)
    rows = json.loads((path / "mpmd_files").read_bytes().partition(b" ")[2])
    rows[name] = [len(text), hashlib.sha256(text.encode()).hexdigest()]
    write_record(path, json.dumps(rows))


def refused(path, named):
    with pytest.raises(mpmd.DamagedCheckpointError, match=named):
        mpmd.restore(path, TREE)


@pytest.mark.parametrize(
    "name", ["mpmd_files", "_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA", "of_mine"]
)
def test_devices_and_pipes_are_not_read(copy, name):
    file = copy / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    refused(copy, f"{file} is no regular file")
    file.unlink()
    file.symlink_to("/dev/zero")
    refused(copy, f"{file} is no regular file")
    file.unlink()
    file.symlink_to("..")
    refused(copy, f"{file} is no regular file")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        "null",
        '{"a": 3}',
        '{"a": [1]}',
        '{"a": [1, 2]}',
        '{"_METADATA": [1e999, null]}',
        "\0",
        NESTED,
    ],
)
def test_a_record_of_something_else(copy, text):
    write_record(copy, text)
    refused(copy, "mpmd_files is damaged")


@pytest.mark.parametrize("name", ["/dev/zero", "../whole", "nowhere"])
def test_a_record_names_no_file_elsewhere(copy, name):
    write_record(copy, json.dumps({name: [0, None]}))
    refused(copy, "(?s)is missing")


@pytest.mark.parametrize("name", ["_METADATA", "array_metadatas/process_0", "mpmd_files"])
def test_a_file_without_end_is_not_read(copy, name):
    with (copy / name).open("wb") as file:
        file.truncate(2**40)
    refused(copy, name)


def test_directories_without_end(copy):
    (copy / "/".join(["d"] * 200)).mkdir(parents=True)
    refused(copy, "is no regular file")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("_METADATA", NESTED),
        ("_METADATA", "[]"),
        ("_METADATA", '{"tree_metadata": {"x": 3}}'),
        ("_METADATA", '{"tree_metadata": {"x": {"key_metadata": [{"key": {}, "key_type": 9}]}}}'),
        ("array_metadatas/process_0", '{"array_metadatas": [3]}'),
        ("array_metadatas/process_0", NESTED),
        ("_strings.json", NESTED),
    ],
)
def test_rubbish_for_a_tree(copy, name, text):
    replace(copy, name, text)
    refused(copy, f"{copy}/({name}|_METADATA)")


def test_a_tree_of_a_thousand_levels_of_keys(copy):
    tree = json.loads((copy / "_METADATA").read_text())
    entry = tree["tree_metadata"]["('weight',)"]
    entry["key_metadata"] = [{"key": "a", "key_type": 2}] * 1000
    replace(copy, "_METADATA", json.dumps(tree))
    refused(copy, "_METADATA|cannot read a.a.a")  # the second where Python recurses as deep as it has memory


def test_keys_that_leave_the_directory(copy):
    tree = json.loads((copy / "_METADATA").read_text())
    tree["tree_metadata"]["('weight',)"]["key_metadata"][0]["key"] = "../../etc"
    replace(copy, "_METADATA", json.dumps(tree | {"use_ocdbt": False}))
    refused(copy, "_METADATA .*etc is not in the directory")


VANISHING = ["ocdbt.process_0/d/*", "manifest.ocdbt", "_METADATA", "."]


@pytest.mark.parametrize("vanishing", VANISHING)
@pytest.mark.parametrize("when", ["before the record", "after the name"])
def test_files_that_vanish_while_they_are_saved(tmp_path, monkeypatch, vanishing, when):
    function = "write_record" if when == "before the record" else "sync_name"
    original = getattr(integrity, function)

    def lose(directory, *arguments):
        for path in [directory] if vanishing == "." else list(directory.glob(vanishing)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        original(directory, *arguments)

    monkeypatch.setattr(integrity, function, lose)
    with pytest.raises((mpmd.CheckpointError, OSError)):
        mpmd.save(tmp_path / "saved", {"weight": np.random.default_rng(0).random(1000)})


def test_a_part_that_vanishes_before_it_is_merged(tmp_path, monkeypatch):
    """Then the index lacks the arrays, and no file that it names."""
    merge = ocp.BasePyTreeCheckpointHandler.finalize

    def lose(handler, directory):
        for path in directory.glob("ocdbt.process_*"):
            shutil.rmtree(path)
        merge(handler, directory)

    monkeypatch.setattr(ocp.BasePyTreeCheckpointHandler, "finalize", lose)
    with pytest.raises((mpmd.CheckpointError, OSError, ValueError)):
        mpmd.save(tmp_path / "saved", {"weight": np.arange(4.0)})


def test_a_checkpoint_without_arrays(tmp_path):
    mpmd.save(tmp_path / "saved", {"name": "run"})
    assert mpmd.restore(tmp_path / "saved", {"name": ""}) == {"name": "run"}
