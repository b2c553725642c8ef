"""A mesh whose connections are encrypted, as they are between machines."""

import socket

import pytest
import ray

SECONDS = 60


def connections_of(actor):
    """The kinds of this process's connections, and the addresses at which it has listened for them."""
    transport = actor._router._transports["network"]
    (peer,) = actor._router._senders.values()
    addresses = [transport._listener.address, actor._server.address]
    return type(peer._connection).__name__, [tuple(address[:2]) for address in addresses]


def test_all_connections_are_encrypted_and_no_port_stays_open(two_groups):
    runtime = two_groups.runtime
    found = ray.get([a.__ray_call__.remote(connections_of) for a in runtime.actors], timeout=SECONDS)
    of_driver = [type(client._connection._connection).__name__ for client in runtime._calls._clients]
    assert [*of_driver, *(kind for kind, _ in found)] == ["EncryptedConnection"] * 4
    for address in {address for _, addresses in found for address in addresses}:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, SECONDS)
