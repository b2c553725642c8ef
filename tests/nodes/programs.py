"""What drivers on the head of a cluster do; ``Nodes.drive`` runs one of these in a process of its own."""

from __future__ import annotations

import json
import pathlib
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import ray
from jax.sharding import PartitionSpec as P

import cluster
import mpmd
from cluster.tcp.sockets import UNREACHABLE_SECONDS
from tests.nodes.network import Network
from tests.support.parity import assert_close

WIDTH, ROWS, MICROBATCHES = 256, 1024, 4  # a message is of 1 MiB
SPECS = (P(), P(None, "fsdp"), P(None, "fsdp"))


def train_step(weights, xs, ys):
    def loss(weights, x, y):
        h = mpmd.mark_stage_end(jnp.tanh(x @ weights[0]))
        return jnp.mean((jnp.tanh(h @ weights[1]) - y) ** 2)

    losses, gradients = mpmd.treduce(
        lambda mb: jax.value_and_grad(loss)(weights, *mb), (xs, ys), mpmd.Std1F1B(2)
    )
    return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], losses


def arguments():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16 for _ in range(2)]
    xs, ys = rng.normal(size=(2, MICROBATCHES, ROWS, WIDTH)).astype(np.float32)
    return weights, xs, ys


def launch(first=2, second=2, **options):
    """Two groups of so many devices."""
    groups = [{"fsdp": first}, {"fsdp": second}]
    return cluster.launch(groups=groups, platform="cpu", compilation_cache=None, timeout=120, **options)


def assert_trains(mesh, steps=2):
    """A step on the mesh computes what plain JAX does."""
    weights, xs, ys = arguments()
    step, reference = mpmd.jit(train_step, mesh, in_specs=SPECS), jax.jit(train_step)
    actual = expected = weights
    for _ in range(steps):
        actual, losses = step(actual, xs, ys)
        expected, expected_losses = reference(expected, xs, ys)
        assert_close(losses, expected_losses)
    assert_close(actual, expected)


def placement(mesh):
    return {
        "nodes": [process.node for process in mesh.processes],
        "groups": [process.mpmd_idx for process in mesh.processes],
        "transports": sorted(set(mesh.transports.values())),
    }


def connections_of(actor):
    """The kinds of a process's connections with other groups and, of the first one of a group, within it."""
    peers = [peer._connection for peer in actor._router._senders.values()]
    return [type(connection).__name__ for connection in (*peers, *actor._agreement._connections)]


def groups_on_nodes_of_their_own(network):
    """Groups of two processes, on a node each."""
    with launch(processes_per_group=2, cpus_per_group=2) as mesh:
        assert_trains(mesh)
        found = ray.get([actor.__ray_call__.remote(connections_of) for actor in mesh.runtime.actors])
        driver = [type(client._connection).__name__ for client in mesh.runtime._calls._clients]
        return placement(mesh) | {"connections": found, "driver": driver}


def a_group_on_two_nodes(network):
    """One node has the first group and half of the second one: there is no room for all of it."""
    with launch(first=1, processes_per_group=[1, 2], cpus_per_group=1.2) as mesh:
        assert_trains(mesh)
        return placement(mesh)


def count_bytes(network):
    """What both nodes send in some steps, and what the messages of the plan have."""
    weights, xs, ys = arguments()
    num_steps = 4
    with launch(cpus_per_group=2) as mesh:
        step = mpmd.jit(train_step, mesh, in_specs=SPECS).compile(weights, xs, ys)
        planned = [group.sent_bytes for group in step.report().groups]
        losses = step(weights, xs, ys)[1]  # this sends the arguments, which stay on the groups
        losses.block_until_ready()
        before = [network.sent_bytes(node) for node in (1, 2)]
        for _ in range(num_steps):
            step(weights, xs, ys)[1].block_until_ready()
        after = [network.sent_bytes(node) for node in (1, 2)]
        return {
            "nodes": [process.node for process in mesh.processes],
            "planned": [num_steps * nbytes for nbytes in planned],
            "sent": [end - start for start, end in zip(before, after, strict=True)],
        }


def cut_a_link(network):
    """The nodes of the groups lose each other for a while, and then for good; the head reaches both."""
    weights, xs, ys = arguments()
    found = {}
    with launch(cpus_per_group=2) as mesh:
        step = mpmd.jit(train_step, mesh, in_specs=SPECS)
        expected = jax.jit(train_step)(weights, xs, ys)
        assert_close(step(weights, xs, ys), expected)

        network.cut(1, 2)
        threading.Timer(5, network.heal, (1, 2)).start()
        start = time.monotonic()
        assert_close(step(weights, xs, ys), expected)
        found["seconds until it went on"] = time.monotonic() - start

        network.cut(1, 2)
        start = time.monotonic()
        try:
            assert_close(step(weights, xs, ys), expected)
            found["error"] = "none"
        except mpmd.GroupDiedError as error:
            found["error"] = str(error)
        found["seconds until the error"] = time.monotonic() - start
    network.heal(1, 2)
    with launch(cpus_per_group=2) as mesh:
        assert_trains(mesh)
    return found


def launch_recovering():
    """Two groups, on a node each. Everything may be tried again often: how often does not matter here."""
    recovery = cluster.Recovery(every=2, max_failures=50)
    return launch(first=1, second=1, cpus_per_group=1.2, recovery=recovery)


def assert_same_after(mesh, disturb):
    """What is trained is the same, bit by bit, when something is done to the nodes on the way."""
    step = mpmd.jit(train_step, mesh, donate_argnums=0)
    undisturbed = trained(step)
    assert trained(step, disturb) == undisturbed


def trained(step, disturb=lambda: None):
    """The bytes of all losses, and of the weights in the end."""
    weights, xs, ys = arguments()
    losses = []
    for number in range(10):
        weights, loss = step(weights, xs + np.float32(number), ys)
        if number == 5:
            disturb()
        losses.append(np.asarray(loss).tobytes())
    return [*losses, *(weight.tobytes() for weight in mpmd.to_host(weights))]


def described(mesh):
    """The recoveries, once the last one has ended."""
    while mesh.runtime.is_recovering:
        time.sleep(0.1)
    time.sleep(1)  # the report comes after the results
    return [[list(report.mpmd_idxs), report.reason, report.lost] for report in mesh.recoveries]


def a_node_dies(network):
    """Nobody says so: its packets are lost."""
    with launch_recovering() as mesh:
        before = placement(mesh)["nodes"]
        dead = network.node_of(before[1])
        assert_same_after(mesh, lambda: network.unplug(dead))
        return {"before": before, "after": placement(mesh)["nodes"], "recoveries": described(mesh)}


def a_link_is_cut_and_heals_too_late(network):
    """The nodes of the groups lose each other for longer than a step waits; the head reaches both."""
    with launch_recovering() as mesh:
        cut = [network.node_of(node) for node in placement(mesh)["nodes"]]

        def disturb():
            network.cut(*cut)
            threading.Timer(UNREACHABLE_SECONDS + 5, network.heal, cut).start()

        assert_same_after(mesh, disturb)
        return {"recoveries": described(mesh)}


def a_slow_link(network):
    """All that a node sends takes long; then also the copies of snapshots and a recovery."""
    with launch_recovering() as mesh:
        slow = network.node_of(placement(mesh)["nodes"][0])
        network.slow(slow, megabits=50)
        try:
            assert_same_after(mesh, lambda: None)
            quiet = described(mesh)
            victim = mesh.runtime.actors[0]
            assert_same_after(mesh, lambda: ray.kill(victim))
        finally:
            network.unslow(slow)
        return {"before": quiet, "recoveries": described(mesh)}


def main() -> None:
    name, result, network, count, address = sys.argv[1:]
    ray.init(address=address, _node_ip_address=address.partition(":")[0], log_to_driver=False)
    returned = globals()[name](Network(network, int(count)))
    pathlib.Path(result).write_text(json.dumps(returned))
    ray.shutdown()


if __name__ == "__main__":
    main()
