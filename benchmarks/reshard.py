"""The copying of weights between parts of a mesh, by `mpmd.reshard`.

A trainer of two stages and a sampler, a group of two devices, are on Ray. Layers of weights go from one
layout to another: `sent` is what groups send one another, `lacking` what the readers lack, and the two have
to be equal. The rate is of the bytes sent, from the call until the copy is complete. The call is all that the
loop of a trainer waits for. Beside it are `memcpy` within a process and a TCP connection over the loopback
interface with nothing around it, in messages of a layer's size.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ray
from jax.sharding import PartitionSpec as P

import cluster
import mpmd
from benchmarks.measure import Conditions, Result, Table, Target, interleaved
from benchmarks.peers import cpu_environment
from benchmarks.peers.ours import START_SECONDS
from benchmarks.transport import MEMCPY, MIB, TCP, connected, on_both
from cluster.transports.choice import NETWORK, SHARED_MEMORY
from mpmd.arrays.array import MpmdArray
from mpmd.compiler.pipeline import compile_step
from mpmd.ir.placement import Placement
from mpmd.ir.routes import bytes_per_step
from mpmd.step.reshard import LeafCopy, copy_request

LAYERS, MICROBATCHES = 8, 2
WIDTH, QUICK_WIDTH = 1448, 724
"""Of the square weights of a layer: 64 MiB in all, or 16."""

PARTS = {"trainer": {"stage": 2}, "sampler": {"stage": 1, "model": 2}}
TRANSPORTS = (SHARED_MEMORY, NETWORK)


class Moved(NamedTuple):
    """A copy of the weights.

    Attributes:
      sent: the bytes that groups send one another.
      lacking: the bytes that groups read and do not hold.
    """

    sent: int
    lacking: int


class Copies:
    """Weights in several layouts, on a mesh whose part ``trainer`` has two groups and ``sampler`` one.

    Attributes:
      moves: for each pair of layouts, the weights in the first and the arguments of ``mpmd.reshard``.
    """

    def __init__(self, mesh: Any, width: int):
        self._mesh = mesh
        weights = jnp.zeros((LAYERS, width, width))
        batch = jnp.zeros((MICROBATCHES, 1, width))
        train = mpmd.jit(_train_step, mesh.part("trainer")).compile(weights, batch)
        sharded = P(None, None, "model"), None
        sample = mpmd.jit(_sample, mesh.part("sampler"), in_shardings=sharded).compile(weights, batch)
        in_stages = mpmd.reshard(weights, to=train)
        on_all = mpmd.reshard(in_stages, to=mesh.part("trainer"))
        self.moves: Mapping[str, tuple[MpmdArray, Any]] = {
            "2 stages to a sharded group": (in_stages, sample),
            "a sharded group to 2 stages": (mpmd.reshard(in_stages, to=sample), train),
            "2 stages to all of both groups": (in_stages, mesh.part("trainer")),
            "all of both groups to 2 stages": (on_all, train),
        }

    def moved(self, name: str) -> Moved:
        """The bytes of a copy: those in its plan, and those by a count of layers."""
        weights, to = self.moves[name]
        copied = mpmd.reshard(weights, to=to)
        aval = jax.ShapeDtypeStruct(weights.shape, weights.dtype)
        copy = LeafCopy(aval, weights.placement, copied.placement, aval)
        plan = compile_step(copy_request([copy], self._mesh.abstract_submeshes)).program.plan
        lacking = sum(
            len(_layers_on(copied.placement, group) - _layers_on(weights.placement, group))
            for group in range(self._mesh.mpmd_dim)
        )
        return Moved(bytes_per_step(plan, self._mesh.topology), lacking * weights.nbytes // LAYERS)

    def seconds(self, name: str) -> tuple[float, float]:
        """The seconds of a copy until it is complete, and those of its call."""
        weights, to = self.moves[name]
        start = time.perf_counter()
        copied = mpmd.reshard(weights, to=to)
        called = time.perf_counter() - start
        copied.block_until_ready()
        return time.perf_counter() - start, called


def _layers_on(placement: Placement, group: int) -> set[int]:
    """The numbers of the layers that a group has."""
    slices = placement.stack.slices if placement.stack else (slice(0, LAYERS),)
    ranges = zip(slices, placement.ranges, strict=True)
    return {layer for cut, held in ranges if group in held.mpmd_idxs for layer in range(LAYERS)[cut]}


def _train_step(weights: jax.Array, xs: jax.Array) -> jax.Array:
    def layer(x, weight):
        return mpmd.mark_stage_end(jnp.tanh(x @ weight), num_stages=2), None

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(layer, x, weights)[0])

    grads = mpmd.treduce(
        lambda x: jax.grad(loss)(weights, x), xs, schedule=mpmd.Std1F1B(2), operation=mpmd.Mean
    )
    return weights - grads


def _sample(weights: jax.Array, xs: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), xs, weights)[0]


def run(conditions: Conditions) -> Result:
    width = QUICK_WIDTH if conditions.quick else WIDTH
    of_layer = width * width * 4
    with contextlib.ExitStack() as stack:
        ends = stack.enter_context(connected(MIB, cpu_environment(1, 1), {}))
        things: dict[str, Callable[[], Any]] = {
            MEMCPY: lambda: ray.get(ends[0].memcpy.remote(of_layer, LAYERS)),
            TCP: lambda: on_both(ends, "tcp_stream", of_layer, LAYERS),
        }
        moved = {}
        for transport in TRANSPORTS:
            mesh = cluster.launch(
                parts=PARTS,
                transport=transport,
                encryption=False,
                cpus_per_group=conditions.cores / 8,
                timeout=START_SECONDS,
            )
            copies = Copies(stack.enter_context(mesh), width)
            moved = {name: copies.moved(name) for name in copies.moves}
            for name in copies.moves:
                things[f"{transport} {name}"] = functools.partial(copies.seconds, name)
        times = {name: of[1:] for name, of in interleaved(things, conditions.effort.repetitions + 1).items()}
    rates = {name: of_layer / statistics.median(times[name]) for name in (MEMCPY, TCP)}
    data = {
        "bytes": {name: copy._asdict() for name, copy in moved.items()},
        "bytes_per_second": rates,
        "seconds_and_of_call": {name: of for name, of in times.items() if name not in rates},
    }
    targets = [
        Target(f"reshard, {name}: bytes sent without need", copy.sent - copy.lacking, 0)
        for name, copy in moved.items()
    ]
    return Result([_bytes(moved), _rates(moved, times, rates), _calls(moved, times)], targets, data)


def _bytes(moved: Mapping[str, Moved]) -> Table:
    rows = [(name, f"{copy.sent:,}", f"{copy.lacking:,}") for name, copy in moved.items()]
    return Table("Reshard: bytes", ("from one layout to another", "sent", "lacking"), tuple(rows))


def _rates(moved: Mapping[str, Moved], times: Mapping[str, Any], rates: Mapping[str, float]) -> Table:
    rows = []
    for name, copy in moved.items():
        cells = []
        for transport in TRANSPORTS:
            seconds = statistics.median(whole for whole, _ in times[f"{transport} {name}"])
            rate = copy.sent / seconds
            shares = ", ".join(f"{rate / of:.0%}" for of in rates.values())
            cells.append(f"{seconds * 1e3:.1f}" + (f"; {rate / 1e9:.2f} ({shares})" if copy.sent else ""))
        rows.append((name, *cells))
    rows.append((f"{MEMCPY}, {TCP}", ", ".join(f"{rate / 1e9:.2f}" for rate in rates.values()), ""))
    header = (f"ms until complete; GB/s (of {MEMCPY}, of {TCP})", *TRANSPORTS)
    return Table("Reshard: rates", header, tuple(rows))


def _calls(moved: Mapping[str, Moved], times: Mapping[str, Any]) -> Table:
    rows = [
        (
            name,
            *(
                f"{statistics.median(of_call for _, of_call in times[f'{transport} {name}']) * 1e3:.2f}"
                for transport in TRANSPORTS
            ),
        )
        for name in moved
    ]
    return Table("Reshard: the trainer waits", ("ms of the call", *TRANSPORTS), tuple(rows))
