"""``ray job submit`` with the real command line, against a head node with its dashboard."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RAY = str(pathlib.Path(sys.executable).parent / "ray")
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "token"}
# The head and the jobs are to make their own choices, not to inherit the tests' fake devices or cluster.
for name in ("XLA_FLAGS", "RAY_ADDRESS"):
    ENVIRONMENT.pop(name, None)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@contextlib.contextmanager
def head_node(directory):
    """A head node of its own; yields the dashboard's address. Ends with the process that it started."""
    dashboard = free_port()
    command = [RAY, "start", "--head", "--block", "--num-cpus=4", "--disable-usage-stats"]
    command += ["--node-ip-address=127.0.0.1", f"--port={free_port()}", f"--temp-dir={directory}"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    # Jobs are started by the agent, whose usual port belongs to whichever Ray of this machine came first.
    command += [f"--dashboard-agent-listen-port={free_port()}"]
    with open(directory / "head.log", "w") as log:
        head = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        head.terminate()
        head.wait(60)


def submit(address, *entrypoint, seconds=120):
    """``ray job submit``, again while the new head says that it is not ready."""
    command = [RAY, "job", "submit", "--address", address, "--working-dir", str(ROOT), "--", *entrypoint]
    deadline = time.monotonic() + seconds
    while True:
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds)
        starting = "No available agent" in done.stderr or "Failed to connect" in done.stderr
        if not starting or time.monotonic() > deadline:
            return done
        time.sleep(0.5)


@pytest.mark.timeout(240)
def test_an_example_runs_as_a_job(tmp_path_factory):
    # Ray's sockets need a short path.
    directory = tmp_path_factory.mktemp("job")
    with head_node(directory) as address:
        done = submit(address, sys.executable, "examples/nabla_gpipe.py", "--ray")
    assert done.returncode == 0, done.stdout + done.stderr + (directory / "head.log").read_text()
    assert "the gradients of the pipeline are those of JAX" in done.stdout
    assert "succeeded" in done.stdout
