"""``ray job submit`` with the real command line, against a head node with its dashboard."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import jax
import pytest

from tests.support.subprocesses import environment

ROOT = pathlib.Path(__file__).parents[2]
RAY = str(pathlib.Path(sys.executable).parent / "ray")
# A busy machine may take longer to start the dashboard than Ray's limit.
ENVIRONMENT = environment(
    RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=os.urandom(32).hex(), RAY_DASHBOARD_STARTUP_TIMEOUT_S="180"
)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@contextlib.contextmanager
def head_node(directory):
    """A head node of its own; yields the dashboard's address. Ends its process."""
    dashboard = free_port()
    command = [RAY, "start", "--head", "--block", "--num-cpus=4", "--disable-usage-stats"]
    command += ["--node-ip-address=127.0.0.1", f"--port={free_port()}", f"--temp-dir={directory}"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    # The agent starts jobs. Another Ray on this machine takes its default port.
    command += [f"--dashboard-agent-listen-port={free_port()}"]
    with open(directory / "head.log", "w") as log:
        head = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        head.terminate()
        head.wait(60)


def submit(address, *entrypoint, options=(), seconds=200):
    """``ray job submit``, once the dashboard answers, and again while it has no agent that starts jobs.

    The command needs seconds of a processor, as the head does to start: it is not tried often.
    """
    command = [RAY, "job", "submit", "--address", address, "--working-dir", str(ROOT), *options]
    command += ["--", *entrypoint]
    deadline = time.monotonic() + seconds
    while not answers(address) and time.monotonic() < deadline:
        time.sleep(0.5)
    while True:
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds)
        if "No available agent" not in done.stderr or time.monotonic() > deadline:
            return done
        time.sleep(3)


def answers(address):
    try:
        urllib.request.urlopen(f"{address}/api/version", timeout=10).close()
    except urllib.error.HTTPError:  # it wants a token, but it is there
        return True
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_runs_as_a_job(tmp_path_factory):
    # Ray's sockets need a short path.
    directory = tmp_path_factory.mktemp("job")
    with head_node(directory) as address:
        done = submit(address, sys.executable, "-m", "cluster.trial", "ray")
    assert done.returncode == 0, done.stdout + done.stderr + (directory / "head.log").read_text()
    assert "computes what jax.jit computes" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_documented_job_brings_its_libraries(tmp_path_factory):
    """The command of ``docs/clusters.md``, with the JAX that is installed here."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    runtime_env = json.loads(re.search(r"--runtime-env-json '(.*)'", text)[1])
    listed = (ROOT / runtime_env["pip"]).read_text().splitlines()
    packages = [package for package in listed if not package.startswith(("#", "jax=="))]
    options = ["--runtime-env-json", json.dumps({"pip": [f"jax=={jax.__version__}", *packages]})]
    entrypoint = shlex.split(re.search(r"^ +-- (.*)$", text, re.MULTILINE)[1])
    assert "examples/alpa_tutorial.py" in entrypoint
    directory = tmp_path_factory.mktemp("job")
    with head_node(directory) as address:
        done = submit(address, *entrypoint, options=options, seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr + (directory / "head.log").read_text()
    assert "opt_state: largest relative error of a leaf" in done.stdout
