"""Two groups of this process, of which group 0 sends to group 1 by one of the transports."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from cluster.tcp import sockets
from cluster.tcp.credentials import make_credentials
from cluster.transports.router import Router
from mpmd.runtime.transport import MessageId
from tests.support.processes import endpoints

SECONDS = 20


def both_ends(credentials, led_through=lambda address: address):
    """A TCP connection: the end that listened, and the end that has connected, perhaps to another address."""
    with sockets.ConnectionListener("127.0.0.1", credentials) as listener:
        connected = sockets.connect(led_through(listener.address), credentials, SECONDS)
        return listener.accept()[1], connected


class Pair:
    """Listens, but is not connected yet.

    Attributes:
      ends: the routers of both groups.
      addresses: of each end, by the name of the transport.
    """

    def __init__(self, name, encryption=True):
        submeshes = [jax.sharding.Mesh(np.array(jax.devices()[i : i + 1]), ("stage",)) for i in range(2)]
        self.name = name
        self.ends = [Router(*each) for each in zip(endpoints([1, 1]), submeshes, strict=True)]
        self.wanted = jax.sharding.SingleDeviceSharding(jax.devices()[1])
        self.listen(encryption)

    def listen(self, encryption=True):
        credentials = make_credentials(encryption)
        self.addresses = [end.listen(["tcp", self.name], "127.0.0.1", credentials) for end in self.ends]

    def connect(self):
        with ThreadPoolExecutor(1) as thread:
            accepting = thread.submit(self.ends[1].connect, {0: self.name}, self.addresses)
            self.ends[0].connect({1: self.name}, self.addresses)
            accepting.result(SECONDS)
        return self

    def reset(self):
        """Both ends listen anew."""
        for end in self.ends:
            end.close()
        self.listen()

    def send(self, tag, *arrays, step=0):
        self.ends[0].send(MessageId(step, 0, 1, tag), arrays)

    def take(self, tag, step=0, count=1):
        """The values of a message, of so many arrays."""
        received = self.ends[1].recv(MessageId(step, 0, 1, tag), [self.wanted] * count)
        return [np.asarray(value) for value in received]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for end in self.ends:
            end.close()


class Broken:
    """An array that cannot be read."""

    dtype, shape = np.dtype("float32"), (3,)

    @property
    def is_fully_replicated(self):
        raise RuntimeError("the task that makes it failed")
