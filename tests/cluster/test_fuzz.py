"""Strangers at every port of the project: no process dies, and no peer is kept waiting."""

import pickle
import random
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.tcp import sockets
from cluster.tcp.credentials import make_credentials
from cluster.tcp.frames import FrameConnection, encode
from tests.support.strangers import answer_wrongly, attack, flood, replay, send_and_leave

SECONDS = 20
"""The time that a peer may take. Alone it takes milliseconds; machines of tests are slow."""

VISITS = 60
"""Of strangers at a port, by each of four threads."""

CREDENTIALS = make_credentials(encryption=True)

ANSWERER = """
import pickle, resource, sys
from cluster.tcp.frames import FrameConnection, encode
from cluster.tcp.sockets import Listener

credentials = pickle.load(sys.stdin.buffer)
with Listener("127.0.0.1") as listener:
    sys.stdout.buffer.write(pickle.dumps(tuple(listener.address)))
    sys.stdout.buffer.flush()
    while True:
        number, accepted = listener.accept(credentials)
        connection = FrameConnection(accepted)
        request = connection.read().decode()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        connection.write(encode(number, (request, peak, len(listener._greetings))))
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
        """The answer: the request, the process's peak in KiB, and the greetings that are under way."""
        with sockets.connect(self.address, CREDENTIALS, SECONDS, number=5) as accepted:
            connection = FrameConnection(accepted)
            connection.write(encode(0, request))
            return connection.read().decode()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def heard():
    """All that a peer with the secret has sent, to a listener with the same credentials."""
    with sockets.Listener("127.0.0.1") as listener, socket.create_server(("127.0.0.1", 0)) as middle:
        address = listener.address._replace(port=middle.getsockname()[1])
        with ThreadPoolExecutor(2) as threads:
            accepting = threads.submit(listener.accept, CREDENTIALS)
            connecting = threads.submit(sockets.connect, address, CREDENTIALS, SECONDS)
            sent = b""
            with middle.accept()[0] as client, socket.create_connection(listener.address[:2]) as server:
                answering = threading.Thread(target=_pump, args=(server, client))
                answering.start()
                while not (accepting.done() and connecting.done()):
                    client.settimeout(0.05)
                    try:
                        part = client.recv(10_000)
                    except TimeoutError:
                        continue
                    sent += part
                    server.sendall(part)
                with accepting.result()[1], connecting.result():
                    server.shutdown(socket.SHUT_RDWR)
                answering.join(SECONDS)
    assert len(sent) > 69
    return sent


def _pump(source, sink):
    while content := source.recv(10_000):
        sink.sendall(content)


def kinds(heard):
    return (send_and_leave, answer_wrongly, replay(heard), replay(heard[:69]))


def test_a_process_survives_all_strangers_and_answers_its_peers_meanwhile(heard):
    with Answerer() as answerer, ThreadPoolExecutor(4) as threads:
        _, before, _ = answerer.ask("first")
        attacks = [threads.submit(attack, answerer.address, kinds(heard), i, VISITS) for i in range(4)]
        answers = 0
        while answers < 10 or not all(one.done() for one in attacks):
            assert answerer.ask(answers)[0] == answers
            answers += 1
        for one in attacks:
            one.result()
        _, peak, _ = answerer.ask("last")
        assert answerer.process.poll() is None
        assert peak - before < 20 * 1024, "it has kept what strangers have sent"


@pytest.mark.slow
def test_more_strangers_than_can_be_greeted_keep_no_peer_waiting():
    with Answerer() as answerer, flood(answerer.address, 600):
        for i in range(5):
            request, _, greetings = answerer.ask(i)
            assert request == i
        assert greetings <= 256


@pytest.mark.slow
def test_who_is_between_two_ends_can_send_nothing_after_their_greeting():
    """All that arrives after it goes to OpenSSL, and no further."""
    numbers = random.Random(0)
    with Answerer() as answerer, socket.create_server(("127.0.0.1", 0)) as middle:
        address = answerer.address._replace(port=middle.getsockname()[1])
        with ThreadPoolExecutor(1) as thread:
            for _ in range(20):
                connecting = thread.submit(sockets.connect, address, CREDENTIALS, SECONDS)
                with middle.accept()[0] as victim, socket.create_connection(answerer.address[:2]) as server:
                    victim.sendall(server.recv(32, socket.MSG_WAITALL))
                    server.sendall(victim.recv(69, socket.MSG_WAITALL))
                    victim.sendall(server.recv(32, socket.MSG_WAITALL))
                    hello = victim.recv(10_000)
                    server.sendall(numbers.choice([hello[:100], b""]) + numbers.randbytes(20_000))
                with pytest.raises(ConnectionError):
                    connecting.result(SECONDS)
        assert answerer.ask("still there")[0] == "still there"
