"""Strangers at every port of the project: no process dies, and no peer is kept waiting."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.tcp import sockets
from cluster.tcp.credentials import make_credentials
from cluster.tcp.frames import encode, read_frame
from tests.support.proxy import Proxy
from tests.support.strangers import answer_wrongly, attack, replay, send_and_leave

SECONDS = 20
"""The time that a peer may take. Alone it takes milliseconds; machines of tests are slow."""

VISITS = 60
"""Of strangers at a port, by each of four threads."""

CREDENTIALS = make_credentials(encryption=True)

ANSWERER = """
import pickle, resource, sys
from cluster.tcp.frames import encode, read_frame
from cluster.tcp.sockets import ConnectionListener

credentials = pickle.load(sys.stdin.buffer)
with ConnectionListener("127.0.0.1", credentials) as listener:
    sys.stdout.buffer.write(pickle.dumps(tuple(listener.address)))
    sys.stdout.buffer.flush()
    while True:
        number, connection = listener.accept()
        request = read_frame(connection).decode()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        connection.write(encode(number, (request, peak)).pieces)
        connection.close()
"""


class Answerer:
    """A process that accepts one peer after the other, and answers one request of each."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", ANSWERER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.process.stdin.write(pickle.dumps(CREDENTIALS))
        self.process.stdin.close()
        self.address = sockets.Address(*pickle.load(self.process.stdout))

    def ask(self, request):
        """The answer: the request, and the process's peak in KiB."""
        with sockets.connect(self.address, CREDENTIALS, SECONDS, number=5) as connection:
            connection.write(encode(0, request).pieces)
            return read_frame(connection).decode()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def heard():
    """What a peer has sent to a listener with the same credentials: its first message, and all."""
    with (
        sockets.ConnectionListener("127.0.0.1", CREDENTIALS) as listener,
        Proxy(listener.address) as proxy,
        sockets.connect(proxy.address, CREDENTIALS, SECONDS),
    ):
        listener.accept()[1].close()
    sent = bytes(proxy.seen[0])
    num_first = 5 + int.from_bytes(sent[3:5], "big")  # a record of TLS
    assert len(sent) > num_first
    return sent[:num_first], sent


def kinds(heard):
    return (send_and_leave, answer_wrongly, *map(replay, heard))


def test_a_process_survives_all_strangers_and_answers_its_peers_meanwhile(heard):
    with Answerer() as answerer, ThreadPoolExecutor(4) as threads:
        _, before = answerer.ask("first")
        attacks = [threads.submit(attack, answerer.address, kinds(heard), i, VISITS) for i in range(4)]
        answers = 0
        while answers < 10 or not all(one.done() for one in attacks):
            assert answerer.ask(answers)[0] == answers
            answers += 1
        for one in attacks:
            one.result()
        _, peak = answerer.ask("last")
        assert answerer.process.poll() is None
        assert peak - before < 20 * 1024, "it has kept what strangers have sent"
