"""A Ray cluster of a head, where drivers run, and two nodes, each in a network namespace."""

import contextlib
import json
import os
import pathlib
import signal
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
        for name in ("XLA_FLAGS", "RAY_ADDRESS"):  # of the tests' own process
            self._environment.pop(name, None)
        self._directory = directory

    @contextlib.contextmanager
    def started(self):
        """Ray runs on all nodes."""
        with contextlib.ExitStack() as undo:
            address = f"{self.network.address(0)}:{RAY_PORT}"
            head = ("--head", f"--port={RAY_PORT}", "--num-cpus=0", "--include-dashboard=false")
            undo.enter_context(self._ray_start(0, *head, f"--temp-dir={self._directory}"))
            for node in range(1, self.network.count):
                undo.enter_context(self._ray_start(node, f"--address={address}", "--num-cpus=2"))
            yield

    @contextlib.contextmanager
    def _ray_start(self, node, *options):
        command = [RAY, "start", "--block", *options, f"--node-ip-address={self.network.address(node)}"]
        command += [f"--{name}={port}" for name, port in PORTS.items()]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        log = self._directory / f"node{node}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                self.network.within(node, *command), env=self._environment, stdout=output, stderr=output
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while "Ray runtime started" not in log.read_text():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._end_rest(node)

    def _end_rest(self, node):
        """What Ray may have left on a node."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.network.namespace(node)], capture_output=True, text=True, check=True
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def drive(self, program, timeout=240):
        """Runs a function of ``programs.py`` as a driver on the head, and returns what it returns."""
        result = self._directory / "result.json"
        result.unlink(missing_ok=True)
        fields = [self.network.name, str(self.network.count), f"{self.network.address(0)}:{RAY_PORT}"]
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
    network = Network(f"mpmd{os.getpid()}", 3)
    # Ray's sockets have long names below it.
    with tempfile.TemporaryDirectory(prefix="mpmd", ignore_cleanup_errors=True) as directory:
        try:
            network.open()
            nodes = Nodes(network, pathlib.Path(directory))
            with nodes.started():
                yield nodes
        finally:
            network.close()
