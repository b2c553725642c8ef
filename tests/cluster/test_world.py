"""Where the processes of a group meet: at a port that no other program has."""

import socket

import pytest

from cluster.world import check_free, reserve_port


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
