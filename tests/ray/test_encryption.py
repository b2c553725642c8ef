"""A mesh whose connections are encrypted, as they are between machines."""

import socket

import pytest
import ray

SECONDS = 60


def connections_of(actor):
    """The kind of this process's connection with its peer, and the address at which it has listened."""
    (peer,) = actor._router._senders.values()
    return type(peer._connection).__name__, tuple(actor._router._listener.address[:2])


def test_all_connections_are_encrypted_and_no_port_stays_open(two_groups):
    runtime = two_groups.runtime
    found = ray.get([a.__ray_call__.remote(connections_of) for a in runtime.actors], timeout=SECONDS)
    of_driver = [type(client._connection).__name__ for client in runtime._calls._clients]
    assert [*of_driver, *(kind for kind, _ in found)] == ["EncryptedConnection"] * 4
    for _, address in found:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, SECONDS)
