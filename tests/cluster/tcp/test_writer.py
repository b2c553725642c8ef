"""The writing half of a connection, with both ends in this process."""

import socket
import threading

import pytest

from cluster.tcp.connection import Connection
from cluster.tcp.writer import Writer
from tests.cluster.tcp.conftest import read


@pytest.fixture
def ends():
    """A writer, and the connection at the other end, which nobody reads yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours, (theirs, _) = socket.create_connection(server.getsockname()), server.accept()
    connection, other = Connection(ours), Connection(theirs)
    writer = Writer(connection, "writes")
    writer.start()
    yield writer, other
    connection.end()
    writer.close()
    connection.close()
    other.close()


def test_nothing_waits_for_a_connection_that_has_ended(ends):
    writer, other = ends
    message = memoryview(bytes(2**22))
    writer.put([message])
    other.end()
    writer.put([message])
    writer._thread.join(0.1)
    assert writer._thread.is_alive(), "it waits for more"
    writer.put([b"small"])


def test_a_message_that_cannot_be_encoded_ends_the_connection_and_the_writer_closes(ends, monkeypatch):
    writer, other = ends
    monkeypatch.setattr(writer._connection, "encoded", failing)
    faults = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    writer.put([memoryview(bytes(2**22))])  # by the thread, since it is large
    with pytest.raises(EOFError):
        read(other, 1)
    writer.put([b"small"])
    writer.close()
    assert isinstance(writer.error, MemoryError) and faults == []


def failing(pieces):
    raise MemoryError("no room for a record")
    yield
