"""Connecting with Ray, of which nothing runs."""

import pytest
import ray

from cluster.start import ray_connection
from cluster.start.ray_connection import connect_to_ray


@pytest.fixture
def started(monkeypatch):
    """The options of Ray while it is started."""
    started = []
    for name in ("RAY_ADDRESS", "RAY_worker_niceness"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(started))
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options))
    monkeypatch.setattr(ray, "shutdown", started.clear)
    monkeypatch.setattr(ray_connection, "_users", set())
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 3.0})
    return started


@pytest.mark.parametrize(("wanted", "niceness"), [(None, 0), ("7", 7)])
def test_workers_run_at_the_niceness_of_the_driver_unless_the_user_wants_another(
    started, monkeypatch, wanted, niceness
):
    if wanted:
        monkeypatch.setenv("RAY_worker_niceness", wanted)
    connect_to_ray(None)
    assert started[0]["_system_config"] == {"worker_niceness": niceness}


def test_the_last_user_ends_a_ray_that_the_first_has_started(started):
    stale = connect_to_ray(None)
    ray.shutdown()
    first, last = connect_to_ray(None), connect_to_ray(None)
    for leave in (stale, first, first):
        leave()
        assert started
    last()
    assert not started
