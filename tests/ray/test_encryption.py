"""A mesh whose connections are encrypted, as they are between machines."""

import socket

import numpy as np
import pytest
import ray

import cluster
import mpmd
from tests.support.models import batch, init, make_step, mse, weights

SECONDS = 60


def connections_of(actor):
    """The kinds of this process's connections, and the addresses at which it has listened for them."""
    transport = actor._router._transports["network"]
    (peer,) = actor._router._senders.values()
    addresses = [transport._listener.address, actor._server.address]
    return type(peer._connection).__name__, [tuple(address[:2]) for address in addresses]


def test_an_encrypted_mesh_computes_the_same_and_leaves_no_port_open(two_groups):
    function = make_step(mse, mpmd.Std1F1B(2))
    arguments = init(weights(2)), *map(np.asarray, batch())
    results = {}
    with cluster.launch(
        {"stage": 2, "fsdp": 2}, "stage", cpus_per_group=0.25, transport="network", encryption=True
    ) as mesh:
        for name, over in (("encrypted", mesh), ("in clear", two_groups)):
            state, (loss, _) = mpmd.jit(function, over)(*arguments)
            results[name] = [np.asarray(loss), *map(np.asarray, mpmd.to_host(state[0])[0].values())]
        runtime = mesh.runtime
        found = ray.get([a.__ray_call__.remote(connections_of) for a in runtime.actors], timeout=SECONDS)
        assert [kind for kind, _ in found] == ["EncryptedConnection"] * 2
        clients = runtime._calls._clients
        assert {type(client._connection._connection).__name__ for client in clients} == {
            "EncryptedConnection"
        }
        for address in {address for _, addresses in found for address in addresses}:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, SECONDS)
    for one, other in zip(*results.values(), strict=True):
        np.testing.assert_array_equal(one, other)
