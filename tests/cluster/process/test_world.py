"""The world of a group's processes: the port where they meet, and the errors when they lose one another."""

import socket

import jax
import pytest

from cluster.process.world import check_free, is_lost, reserve_port


def test_a_reserved_port_is_free_for_the_coordinator_alone():
    with reserve_port() as first, reserve_port() as second, socket.socket() as other:
        port = first.getsockname()[1]
        assert port != second.getsockname()[1]
        check_free(("127.0.0.1", port))
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))


@pytest.mark.parametrize(
    ("shares", "reason"), [(False, "Address already in use"), (True, "it answers")], ids=["alone", "shared"]
)
def test_a_port_that_another_program_has_is_refused(shares, reason):
    with socket.create_server(("127.0.0.1", 0), reuse_port=shares) as other:
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"cannot meet at 127.0.0.1:{port}, .*: .*{reason}"):
            check_free(("127.0.0.1", port))


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_errors_of_collectives_are_told_from_others(kind):
    assert is_lost(kind("UNKNOWN: Gloo AllGather failed: Connection reset by peer"))
    assert not is_lost(kind("RESOURCE_EXHAUSTED: Out of memory"))
    assert not is_lost(OSError("Gloo"))
    assert not is_lost(None)
