"""Who stands between the two ends of a TCP connection."""

import contextlib
import socket
import threading

SECONDS = 20


class Proxy:
    """Stands between two ends, and may change what it passes on.

    Args:
      address: to which it connects who connects to it; ``address`` is its own.
      change: is called with the direction, 0 to the listener, and what passes.
    """

    def __init__(self, address, change=lambda direction, content: content):
        self.seen = [bytearray(), bytearray()]
        self.change = change
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = address._replace(port=self.listening.getsockname()[1])
        self.target = address
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        client, _ = self.listening.accept()
        with client, socket.create_connection(self.target[:2], SECONDS) as server:
            ways = [
                threading.Thread(target=self.pump, args=way)
                for way in ((0, client, server), (1, server, client))
            ]
            for way in ways:
                way.start()
            for way in ways:
                way.join()

    def pump(self, direction, source, sink):
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                self.seen[direction] += content
                sink.sendall(self.change(direction, content))
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.thread.join(SECONDS)
        self.listening.close()


class Flips:
    """A ``change`` for a ``Proxy``: flips a bit of what passes to the listener, once ``arm`` was called."""

    def __init__(self):
        self.left = None
        self.passed = 0

    def arm(self, offset, bit=0):
        """Flips a bit of the byte that is this far from now."""
        self.left, self.bit = offset, bit

    def __call__(self, direction, content):
        if direction == 1:
            return content
        self.passed += len(content)
        if self.left is None:
            return content
        if self.left >= len(content):
            self.left -= len(content)
            return content
        changed = bytearray(content)
        changed[self.left] ^= 1 << self.bit
        self.left = None
        return bytes(changed)
