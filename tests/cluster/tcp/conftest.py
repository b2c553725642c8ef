"""A port, and who is let in there."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.tcp import sockets
from cluster.tcp.credentials import make_credentials

SECONDS = 20
CREDENTIALS = make_credentials()


@pytest.fixture
def listener():
    with sockets.ConnectionListener("127.0.0.1", CREDENTIALS) as listener:
        yield listener


@pytest.fixture
def accepted(listener):
    """The next peer that is let in, in the future: in the end one is, whoever came before."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(listener.accept)
        yield future
        if not future.done():
            sockets.connect(listener.address, CREDENTIALS, SECONDS).close()
        future.result(SECONDS)[1].close()


def read(connection, num_bytes):
    buffer = memoryview(bytearray(num_bytes))
    connection.read_into(buffer)
    return bytes(buffer)
