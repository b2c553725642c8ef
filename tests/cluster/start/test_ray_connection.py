"""Connecting with Ray, of which nothing runs."""

import pytest
import ray

from cluster.start.ray_connection import connect_to_ray


@pytest.fixture
def started(monkeypatch):
    """The options of Ray while it is started."""
    started = []
    for name in ("RAY_ADDRESS", "RAY_worker_niceness"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(started))
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 3.0})
    monkeypatch.setattr(ray, "shutdown", started.clear)
    return started


def test_without_ray_a_local_one_is_started_with_a_message_and_ended(started, capsys):
    end = connect_to_ray(None)
    assert [options["address"] for options in started] == ["local"]
    assert capsys.readouterr().err.endswith("started Ray on this machine, 3 CPUs\n")
    connect_to_ray(None)()
    assert len(started) == 1, "who finds Ray running neither starts nor ends it"
    end()
    assert not started


@pytest.mark.parametrize(("wanted", "niceness"), [(None, 0), ("7", 7)])
def test_workers_run_at_the_niceness_of_the_driver_unless_the_user_wants_another(
    started, monkeypatch, wanted, niceness
):
    if wanted:
        monkeypatch.setenv("RAY_worker_niceness", wanted)
    connect_to_ray(None)
    assert started[0]["_system_config"] == {"worker_niceness": niceness}
