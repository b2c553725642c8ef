"""The viewer's look at runs, over a store in this process."""

import dataclasses
import threading

import pytest

from cluster import ray_compat
from cluster.watching.keys import RUN, VIEW
from cluster.watching.reader import look
from tests.watching.test_run_record import RECORD

SECONDS = 60


class Store:
    """A store as Ray's, and drivers that answer whoever asks."""

    def __init__(self, *records, answers=(), ended=()):
        self._values = {RUN + record.run: record.to_json().encode() for record in records}
        self._answers, self._ended = answers, frozenset(ended)
        self._changing = threading.Lock()

    def names(self, beginning):
        return [name for name in self._values if name.startswith(beginning)]

    def get(self, name):
        return self._values.get(name)

    def put(self, name, value):
        with self._changing:
            self._values[name] = value
        run = name.removeprefix(VIEW)
        if run in self._answers:
            self._answers[run](self, run)

    def ended_jobs(self):
        return self._ended


def publish(store, run):
    record = dataclasses.replace(RECORD, run=run, published=RECORD.published + 1)
    store.put(RUN + run, record.to_json().encode())


def publish_later(store, run):
    threading.Timer(0.3, publish, (store, run)).start()


def end(store, run):
    del store._values[RUN + run]


def named(run, **changes):
    return dataclasses.replace(RECORD, run=run, **changes)


def test_a_driver_is_asked_and_waited_for():
    store = Store(named("a"), named("b"), answers={"a": publish, "b": publish_later})
    seen = look(store, SECONDS)
    assert {run: record.published for run, record in seen.records.items()} == {"a": 4, "b": 4}
    assert not seen.silent and not seen.unreadable


def test_a_driver_that_does_not_answer_is_silent():
    seen = look(Store(named("a"), named("b"), answers={"a": publish}), seconds=0.3)
    assert seen.silent == {"b"} and set(seen.records) == {"a", "b"}
    described = seen.as_json("10.0.0.1:1")
    assert [(run["record"]["run"], run["answered"]) for run in described["runs"]] == [
        ("a", True),
        ("b", False),
    ]


def test_a_run_of_a_job_that_has_ended_is_none():
    store = Store(named("a", job="02000000"), ended=["02000000"])
    assert not look(store, SECONDS).records
    assert store.names(VIEW) == []


def test_a_run_that_ends_meanwhile_is_none():
    assert not look(Store(named("a"), answers={"a": end}), SECONDS).records


def test_what_cannot_be_read_is_said():
    store = Store(named("a"), answers={"a": publish})
    store.put(f"{RUN}b", b"\x80\x04N.")  # a pickle
    seen = look(store, SECONDS)
    assert set(seen.records) == {"a"} and len(seen.unreadable) == 1


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Has these be the processes of this machine, by their command lines."""

    def use(*command_lines):
        for pid, words in enumerate(command_lines):
            folder = tmp_path / str(pid)
            folder.mkdir()
            (folder / "cmdline").write_text("\0".join(words))
        monkeypatch.setattr(ray_compat, "Path", lambda path: tmp_path)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return use


def test_clusters_are_those_of_rays_processes(processes):
    raylet = "/somewhere/ray/raylet"
    processes(
        [raylet, "--node=1", "--gcs-address=10.0.0.1:6379", "--more"],
        [raylet, "--gcs-address=10.0.0.1:6380"],
        [raylet, "--gcs-address=10.0.0.1:6379"],
        ["/bin/sh", "--gcs-address=10.0.0.1:6381"],
        [""],
    )
    assert ray_compat.clusters_here(None) == ["10.0.0.1:6379", "10.0.0.1:6380"]
    assert ray_compat.clusters_here("auto") == ["10.0.0.1:6379", "10.0.0.1:6380"]


def test_clusters_of_other_users_are_not_looked_at(processes, monkeypatch):
    processes(["raylet", "--gcs-address=10.0.0.1:6379"])
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert ray_compat.clusters_here(None) == []


def test_an_address_is_the_only_one_to_look_at(processes, monkeypatch):
    processes(["raylet", "--gcs-address=10.0.0.1:6379"])
    assert ray_compat.clusters_here("10.0.0.2:1") == ["10.0.0.2:1"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.3:1")
    assert ray_compat.clusters_here(None) == ["10.0.0.3:1"]
