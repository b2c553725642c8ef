"""The job of ``examples/deploy/slurm.sh`` on two nodes, with commands that stand for those of Slurm."""

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
PORTS = range(50000, 51000)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCONTROL = """#!/usr/bin/env bash
printf 'node0\\nnode1\\n'
"""

SRUN = """#!{python}
import re, signal, subprocess, sys

options = {{}}
arguments = sys.argv[1:]
while arguments[0].startswith("--"):
    name, _, value = arguments.pop(0).partition("=")
    options[name] = value
nodes = [int(name[4:]) for name in ("node0", "node1")
         if options.get("--nodelist", name) == name != options.get("--exclude")]
assert options["--nodes"] == options["--ntasks"] == str(len(nodes)), (options, nodes)
tasks = [subprocess.Popen(["ip", "netns", "exec", f"{name}-{{node}}", "env", f"NODE={{node}}", *arguments])
         for node in nodes]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""

HOSTNAME = """#!/usr/bin/env bash
echo "10.77.0.$((NODE + 1)) "
"""

PROGRAM = """
import json, pathlib, sys

import jax, jax.numpy as jnp, numpy as np, psutil, ray

import cluster, mpmd


def train_step(params, x):
    def loss(params, x):
        return jnp.mean((mpmd.mark_stage_end(x @ params[0]) @ params[1]) ** 2)

    value, grads = mpmd.value_and_grad(loss, num_microbatches=2, schedule=mpmd.Std1F1B(2))(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


# Each group has two processes, so that it has ports of its own; they are too many for one node.
options = dict(processes_per_group=2, cpus_per_group=2, timeout=300, compilation_cache=None)
with cluster.launch({"stage": 2, "data": 2}, "stage", platform="cpu", **options) as mesh:
    params, value = mpmd.jit(train_step, mesh)([np.eye(8, dtype=np.float32)] * 2, np.ones((4, 8), np.float32))
    nodes, here = {process.node for process in mesh.processes}, ray.util.get_node_ip_address()
    pids = [process.pid for process in mesh.processes if process.node == here]
    sockets = [each for pid in pids for each in psutil.Process(pid).net_connections("tcp")]
    ports = {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}
    found = {"nodes": sorted(nodes), "value": float(value), "ports": sorted(ports)}
pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
sys.exit(7)
"""


@pytest.fixture
def network():
    if reason := why_impossible():
        pytest.skip(reason)
    network = Network(f"slurm{os.getpid()}", 2)
    try:
        network.open()
        yield network
    finally:
        for node in range(2):
            network.kill(node)
        network.close()


@pytest.fixture
def commands(network, tmp_path):
    """The folder of the commands that stand for others."""
    folder = tmp_path / "commands"
    folder.mkdir()
    srun = SRUN.format(python=sys.executable, name=network.name)
    for name, text in (("scontrol", SCONTROL), ("srun", srun), ("hostname", HOSTNAME)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def test_a_job_runs_a_program_on_all_nodes_and_ends_ray(network, commands, tmp_path):
    for node in range(2):
        sysctl = ("sysctl", "-qw", f"net.ipv4.ip_local_port_range={PORTS[0]} {PORTS[-1]}")
        subprocess.run(network.within(node, *sysctl), check=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    of_tests = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in of_tests}
    with tempfile.TemporaryDirectory(prefix="mpmd", ignore_cleanup_errors=True) as directory:
        environment |= {
            "PATH": os.pathsep.join(
                [str(commands), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "RAY_TMPDIR": directory,  # Ray's sockets have long names below it
            "RAY_raylet_start_wait_time_s": "180",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
        }
        job = ("bash", str(ROOT / "examples" / "deploy" / "slurm.sh"), "program.py", "found.json")
        done = subprocess.run(
            network.within(0, *job),
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert done.returncode == 7, done.stdout + done.stderr  # that of the program
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["nodes"] == [network.address(0), network.address(1)]
    assert found["value"] == 1.0
    deadline = time.monotonic() + 60
    while left := [pid for node in range(2) for pid in network.pids(node)]:  # Ray's processes end one by one
        assert time.monotonic() < deadline, [pathlib.Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        time.sleep(0.5)
    # What the project opens is in the range of the system; Ray's workers have a range of their own.
    ports = found["ports"]
    assert any(port in PORTS for port in ports)
    assert all(port in PORTS or port in range(10002, 20000) for port in ports)
