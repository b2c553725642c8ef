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
    return started


@pytest.mark.parametrize(("wanted", "niceness"), [(None, 0), ("7", 7)])
def test_workers_run_at_the_niceness_of_the_driver_unless_the_user_wants_another(
    started, monkeypatch, wanted, niceness
):
    if wanted:
        monkeypatch.setenv("RAY_worker_niceness", wanted)
    connect_to_ray(None)
    assert started[0]["_system_config"] == {"worker_niceness": niceness}
