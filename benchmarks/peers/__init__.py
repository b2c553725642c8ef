"""Ways to run the same training steps: ours, the honest baselines, and what else anyone can run here.

A peer is set up with a ``Setting`` when it is made. ``run(steps)`` runs so many steps, as a training loop
would that reads the loss at the end, waits for them and returns the last loss; ``close()`` ends what it
started. Each is made in a process of its own, see ``benchmarks.host``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Literal

from benchmarks.host import Host
from benchmarks.workload import Setting


@dataclasses.dataclass(frozen=True)
class Peer:
    """A way to run the steps, as far as it is known before its process starts.

    Attributes:
      key: names it in results, and on the command line.
      name: names it in tables.
      factory: what makes it, for ``Host``.
      devices: how many CPU devices JAX shows its process.
      threads: how many threads its process may compute with: all cores, or a group's share of them. The
        actors and processes that a peer starts have their share in any case.
      needs: a package that is not installed with ours.
      rests: whether it takes processor time when it has nothing to do, unless it is told to ``rest()``.
    """

    key: str
    name: str
    factory: str
    devices: Literal["one", "groups"] = "one"
    threads: Literal["all", "share"] = "all"
    needs: str = ""
    rests: bool = False

    @property
    def missing(self) -> bool:
        """Whether it cannot run here."""
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None

    def start(self, setting: Setting) -> Host:
        """Starts its process. The peer is set up once the host is ready."""
        devices = setting.workload.groups if self.devices == "groups" else 1
        threads = setting.cores if self.threads == "all" else setting.share
        return Host(self.factory, (setting,), cpu_environment(devices, threads), self.name)


def cpu_environment(devices: int, threads: int) -> dict[str, str]:
    """The variables that give a process so many CPU devices of JAX, and a pool of so many threads."""
    from cluster.start.environment import actor_environment  # not needed by all who need the rest

    return {**actor_environment({}, "", "cpu", devices, threads), "OMP_NUM_THREADS": str(threads)}


PEERS = (
    Peer("jit", "jax.jit, one device", "benchmarks.peers.plain_jit:PlainJit"),
    Peer("seq", "seq: our executables, one thread", "benchmarks.peers.baselines:Sequential"),
    Peer("thr", "thr: our executables, threads", "benchmarks.peers.baselines:Threads"),
    Peer("spmd", "SPMD GPipe (shard_map)", "benchmarks.peers.spmd_gpipe:SpmdGPipe", "groups"),
    Peer("in_process", "mpmd in process", "benchmarks.peers.ours:InProcess", "groups"),
    Peer(
        "in_process_inline",
        "mpmd in process, inline dispatch",
        "benchmarks.peers.ours:InProcessInline",
        "groups",
    ),
    Peer("on_ray", "mpmd on Ray", "benchmarks.peers.ours:OnRay"),
    Peer("ray_calls", "Ray, a call per task", "benchmarks.peers.ray_by_hand:Calls"),
    Peer("ray_graph", "Ray, compiled graph", "benchmarks.peers.ray_by_hand:CompiledGraph", rests=True),
    Peer("torch", "torch 1F1B (gloo)", "benchmarks.peers.torch_1f1b:Torch1F1B", needs="torch"),
)

PIPELINED = ("thr", "spmd", "ray_calls", "ray_graph", "torch")
"""The peers that pipeline."""

TASK_TIMES = Peer("tasks", "task times", "benchmarks.peers.baselines:TaskTimes", threads="share")
"""Not a way to train, but to know how long each task takes when nothing disturbs it."""
