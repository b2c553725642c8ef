"""Records: every byte arrives as it was sent, in whatever pieces, or none does."""

import contextlib
import itertools
import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.protocol.digests import CorruptedError
from cluster.tcp.connection import Connection
from cluster.tcp.records import RecordReader, RecordWriter

SIZES = st.one_of(st.integers(0, 300), st.integers(60_000, 70_000), st.integers(250_000, 600_000))


@contextlib.contextmanager
def both_ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


@given(
    written=st.lists(st.lists(SIZES, max_size=4), min_size=1, max_size=4),
    read=st.lists(SIZES.map(lambda size: size + 100), min_size=1, max_size=4),
)
def test_bytes_arrive_in_whatever_pieces_they_are_written_and_read(written, read):
    content = np.random.default_rng(0).bytes(sum(map(sum, written)))
    with both_ends() as (one, other):
        source, sink = Connection(one), Connection(other)

        def write():
            start = 0
            for sizes in written:
                pieces = []
                for size in sizes:
                    pieces.append(memoryview(content)[start : start + size])
                    start += size
                source.write(pieces)

        writing = threading.Thread(target=write)
        writing.start()
        received = bytearray()
        for size in itertools.cycle(read):
            buffer = bytearray(min(size, len(content) - len(received)))
            if not buffer:
                break
            sink.read_into(memoryview(buffer))
            received += buffer
        writing.join()
        assert received == content


@pytest.mark.parametrize("order", [[0, 0], [1], [1, 0], [0, 2]], ids=str)
def test_a_record_that_is_missing_or_comes_twice_or_early_is_noticed(order):
    writer = RecordWriter()
    records = [b"".join(*writer.records([memoryview(b"same")])) for _ in range(3)]
    with both_ends() as (one, other):
        one.sendall(b"".join(records[i] for i in order))
        reader = RecordReader(other)
        with pytest.raises(CorruptedError, match=r"the head of record \d from .* was changed on the way"):
            for _ in order:
                reader.read()


def test_the_end_of_a_connection_within_a_record_is_no_fault_of_the_record():
    (record,) = RecordWriter().records([memoryview(b"content")])
    with both_ends() as (one, other):
        one.sendall(b"".join(record)[:-1])
        one.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            RecordReader(other).read()
