"""Connecting with Ray, of which nothing runs."""

import ray

from cluster.start.ray_connection import connect_to_ray


def test_without_ray_a_local_one_is_started_with_a_message_and_ended(monkeypatch, capsys):
    started = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(started))
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options["address"]))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 3.0})
    monkeypatch.setattr(ray, "shutdown", started.clear)
    end = connect_to_ray(None)
    assert started == ["local"]
    assert capsys.readouterr().err.endswith("started Ray on this machine, 3 CPUs\n")
    connect_to_ray(None)()
    assert started == ["local"], "who finds Ray running neither starts nor ends it"
    end()
    assert not started
