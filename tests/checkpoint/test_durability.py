"""A checkpoint that has its name survives a loss of power, and one save at a time writes to a path."""

import os
import threading
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import mpmd
from mpmd.checkpoint import integrity

TREE = {"weight": np.ones(3), "name": "run"}


@pytest.fixture
def events(monkeypatch):
    """What is synced, and renamed, in order."""
    noted = []
    fsync, rename = os.fsync, os.rename

    def noting_fsync(descriptor):
        noted.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noting_rename(source, target):
        noted.append(("rename", os.fspath(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    return noted


def files_under(directory):
    return {str(path.relative_to(directory)) for path in Path(directory).rglob("*")}


def test_files_are_synced_before_a_checkpoint_has_its_name_and_the_name_after_it(tmp_path, events):
    path = tmp_path / "new" / "run" / "100"
    mpmd.save(path, TREE)
    named = events.index(("rename", str(path)))
    temporary = f"{path}.orbax-checkpoint-tmp"
    before = {os.path.relpath(name, temporary) for kind, name in events[:named] if kind == "sync"}
    assert before >= files_under(path) - {"commit_success.txt"} | {"."}
    after = [name for kind, name in events[named:] if kind == "sync"]
    assert {f"{path}/commit_success.txt", f"{path}/_CHECKPOINT_METADATA", str(path)} <= set(after)
    assert after[-3:] == [str(tmp_path / "new/run"), str(tmp_path / "new"), str(tmp_path)]


def test_a_manager_gives_names_to_synced_files_too(tmp_path, events):
    with ocp.CheckpointManager(tmp_path, item_handlers=mpmd.checkpoint.handler()) as manager:
        manager.save(1, args=ocp.args.PyTreeSave(TREE))
        manager.wait_until_finished()
    synced = {Path(name).name for kind, name in events if kind == "sync"}
    assert {"_METADATA", "_strings.json", "manifest.ocdbt", integrity.RECORD} <= synced


def test_two_saves_to_one_path(tmp_path, monkeypatch):
    held, write = threading.Event(), integrity.write_record
    monkeypatch.setattr(integrity, "write_record", lambda directory: held.wait(60) and write(directory))
    first = mpmd.save_async(tmp_path / "saved", TREE)
    with pytest.raises(ValueError, match=f"{tmp_path}/saved is being saved to: wait for that"):
        mpmd.save(tmp_path / "saved", TREE)
    held.set()
    first.result()
    assert os.listdir(tmp_path) == ["saved"]
    with pytest.raises(ValueError, match="exists already"):
        mpmd.save(tmp_path / "saved", TREE)
    assert mpmd.restore(tmp_path / "saved", TREE)["name"] == "run"
    assert os.listdir(tmp_path) == ["saved"]
