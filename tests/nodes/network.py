"""Several nodes on one machine: network namespaces, joined by a bridge in a namespace of its own.

Nothing of it touches the machine's own network: there is no address, route or rule outside of the namespaces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess


@dataclasses.dataclass(frozen=True)
class Network:
    """The nodes ``0`` to ``count - 1``. Any process on the machine may make one of equal fields, and use it.

    Args:
      name: with which the names of its namespaces begin.
      count: of nodes.
    """

    name: str
    count: int

    def open(self) -> None:
        """Makes the namespaces. Raises ``CalledProcessError`` when this process may not."""
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for node in range(self.count):
            inside, port = self.namespace(node), f"port{node}"
            _run("ip", "netns", "add", inside)
            pair = ("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", inside)
            _run("ip", "-n", self._switch, *pair)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", inside, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", inside, "link", "set", link, "up")

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def namespace(self, node: int) -> str:
        return f"{self.name}-{node}"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def within(self, node: int, *command: str) -> list[str]:
        """The command line that runs a command on a node."""
        return ["ip", "netns", "exec", self.namespace(node), *command]

    def cut(self, *nodes: int) -> None:
        """The nodes do not reach one another any more, without notice; they still reach all others."""
        self._isolate(nodes, "on")

    def heal(self, *nodes: int) -> None:
        """The opposite of ``cut``."""
        self._isolate(nodes, "off")

    def _isolate(self, nodes: tuple[int, ...], state: str) -> None:
        for node in nodes:
            _run("bridge", "-n", self._switch, "link", "set", "dev", f"port{node}", "isolated", state)

    def unplug(self, node: int) -> None:
        """The node reaches nobody, without notice, as when its power is gone."""
        _run("ip", "-n", self._switch, "link", "set", f"port{node}", "down")

    def plug(self, node: int) -> None:
        """The opposite of ``unplug``."""
        _run("ip", "-n", self._switch, "link", "set", f"port{node}", "up")

    def slow(self, node: int, megabits: int) -> None:
        """The node sends so much in a second at most."""
        limit = ("tbf", "rate", f"{megabits}mbit", "burst", "64kbit", "latency", "400ms")
        _run("tc", "-n", self.namespace(node), "qdisc", "replace", "dev", "eth0", "root", *limit)

    def unslow(self, node: int) -> None:
        """The opposite of ``slow``."""
        _run("tc", "-n", self.namespace(node), "qdisc", "delete", "dev", "eth0", "root")

    def pids(self, node: int) -> list[int]:
        """The processes of a node."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace(node)).split()]

    def kill(self, node: int) -> None:
        """Ends all processes of a node."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def node_of(self, address: str) -> int:
        """The opposite of ``address``."""
        return [self.address(node) for node in range(self.count)].index(address)

    def sent_bytes(self, node: int) -> int:
        """What a node has sent since it exists, with all headers."""
        (link,) = json.loads(_run("ip", "-n", self.namespace(node), "-s", "-j", "link", "show", "eth0"))
        return link["stats64"]["tx"]["bytes"]

    def close(self) -> None:
        """Removes what is there of it; all processes in it have to have ended."""
        for name in (*map(self.namespace, range(self.count)), self._switch):
            if pathlib.Path("/run/netns", name).exists():
                _run("ip", "netns", "delete", name)


def why_impossible() -> str | None:
    """Why this process cannot make namespaces; ``None``: it can."""
    if missing := [tool for tool in ("ip", "bridge", "tc") if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}, of iproute2"
    probe = Network(f"mpmd-probe-{os.getpid()}", 1)
    try:
        probe.open()
    except subprocess.CalledProcessError as error:
        return f"cannot make network namespaces: {error.stderr.strip()}"
    finally:
        probe.close()
    return None


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
