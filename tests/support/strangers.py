"""Who connects to a port without its credentials: what they send, by a seed."""

import contextlib
import pickle
import random
import socket
import ssl
import struct

SECONDS = 20


class Explodes:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return exec, ("import os; os._exit(66)",)


def rubbish(numbers):
    """Any bytes; none, and more than any handshake has."""
    return numbers.randbytes(numbers.choice([0, 1, 5, 32, 69, 100, 101, 133, 5000, 200_000]))


def lengths(numbers):
    """What would be huge lengths in the frames of the project, of ``multiprocessing`` and of JAX."""
    return b"".join(
        [
            bytes(numbers.randrange(70)),
            struct.pack("<QQI", 0, 2 ** numbers.randrange(30, 63), 2**32 - 1),
            struct.pack("!iQ", -1, 2 ** numbers.randrange(30, 63)),
            struct.pack("<BQqi", 0, 2 ** numbers.randrange(30, 63), 0, 0),
            bytes(5),
        ]
    )


def pickled(numbers):
    """What would end the process if it were unpickled, as a frame."""
    content = pickle.dumps(Explodes())
    head = struct.pack("<QQI", 0, len(content), 0)
    return bytes(numbers.choice([0, 32, 69, 101])) + head + content


def client_hello(numbers):
    """The beginning of a handshake of TLS, as far as a parser looks first, and then anything."""
    return b"\x16\x03\x01" + struct.pack("!H", numbers.randrange(2**16)) + b"\x01" + numbers.randbytes(500)


CONTENTS = (rubbish, lengths, pickled, client_hello)


def send_and_leave(address, numbers):
    """Sends at once, and closes or resets the connection."""
    with connected(address) as tcp:
        tcp.sendall(numbers.choice(CONTENTS)(numbers))
        if numbers.random() < 0.5:
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def answer_wrongly(address, numbers):
    """Begins a handshake of TLS as it should be, without a certificate, and goes on with anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=address.identity)
    with connected(address) as tcp:
        for _ in range(numbers.choice([1, 2])):
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
            tcp.sendall(outgoing.read())
            incoming.write(tcp.recv(10_000))
        tcp.sendall(numbers.choice(CONTENTS)(numbers))
        tcp.shutdown(socket.SHUT_WR)
        while tcp.recv(4096):
            pass


def replay(heard):
    """Returns a stranger that sends what was heard from somebody who had the credentials."""

    def stranger(address, numbers):
        with connected(address) as tcp:
            tcp.sendall(heard)
            if numbers.random() < 0.5:
                tcp.recv(10_000)
            tcp.sendall(numbers.choice(CONTENTS)(numbers))

    return stranger


def connected(address):
    return socket.create_connection(address[:2], SECONDS)


def attack(address, strangers, seed, count):
    """So many visits, one after the other."""
    numbers = random.Random(seed)
    for _ in range(count):
        with contextlib.suppress(OSError):  # it is refused, or cut off, as it should be
            numbers.choice(strangers)(address, numbers)
