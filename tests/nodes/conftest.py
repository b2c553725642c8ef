"""A Ray cluster of a head, where drivers run, and two nodes or three, each in a network namespace."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest

from tests.nodes.network import Network, why_impossible

ROOT = pathlib.Path(__file__).parents[2]
RAY = str(pathlib.Path(sys.executable).parent / "ray")
RAY_PORT = 6379
START_SECONDS = 180
# With given ports, a node waits for no agent's file; each namespace has all ports to itself.
PORTS = {
    "metrics-export-port": 9101,
    "dashboard-agent-grpc-port": 9102,
    "dashboard-agent-listen-port": 9103,
    "runtime-env-agent-port": 9104,
    "node-manager-port": 9105,
    "object-manager-port": 9106,
}


class Nodes:
    """The cluster, while it runs.

    Args:
      network: its nodes; ``0`` is the head.
      directory: for Ray's files.
    """

    def __init__(self, network, directory):
        self.network = network
        self._environment = {
            **os.environ,
            "RAY_raylet_start_wait_time_s": str(START_SECONDS),  # more than the default, for busy machines
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(32).hex(),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }
        for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "RAY_ADDRESS"):  # of the tests' own process
            self._environment.pop(name, None)
        self._directory = directory
        self._head_address = f"{network.address(0)}:{RAY_PORT}"
        self._processes = {}

    @contextlib.contextmanager
    def started(self, *nodes):
        """Ray runs on these nodes, too. The head is the first."""
        try:
            for node in nodes:
                self._start(node)
            yield
        finally:
            for node in reversed(nodes):
                self._stop(node)

    def restart(self, node):
        """Ray runs anew on a node that was unplugged."""
        self._stop(node)
        self.network.plug(node)
        self._start(node)

    def _start(self, node):
        options = [f"--address={self._head_address}", "--num-cpus=2"]
        if node == 0:
            head = ["--head", f"--port={RAY_PORT}", "--num-cpus=0", "--include-dashboard=false"]
            options = [*head, f"--temp-dir={self._directory}"]
        command = [RAY, "start", "--block", *options, f"--node-ip-address={self.network.address(node)}"]
        command += [f"--{name}={port}" for name, port in PORTS.items()]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        log = self._directory / f"node{node}.log"
        with log.open("w") as output:
            process = self._processes[node] = subprocess.Popen(
                self.network.within(node, *command), env=self._environment, stdout=output, stderr=output
            )
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def _stop(self, node):
        if (process := self._processes.pop(node, None)) is None:
            return
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.network.kill(node)  # what Ray may have left

    def drive(self, program, timeout=240):
        """Runs a function of ``programs.py`` as a driver on the head, and returns what it returns."""
        result = self._directory / "result.json"
        result.unlink(missing_ok=True)
        fields = [self.network.name, str(self.network.count), self._head_address]
        command = [sys.executable, "-m", "tests.nodes.programs", program.__name__, str(result), *fields]
        done = subprocess.run(
            self.network.within(0, *command),
            env=self._environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(result.read_text())


@pytest.fixture(scope="session")
def nodes():
    if reason := why_impossible():
        pytest.skip(reason)
    network = Network(f"mpmd{os.getpid()}", 4)
    # Ray's sockets have long names below it.
    with tempfile.TemporaryDirectory(prefix="mpmd", ignore_cleanup_errors=True) as directory:
        try:
            network.open()
            nodes = Nodes(network, pathlib.Path(directory))
            with nodes.started(0, 1, 2):
                yield nodes
        finally:
            network.close()
