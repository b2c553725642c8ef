"""Ways to run the same training steps: ours, baselines of the same executables, and other systems.

A peer is made with a ``Setting``, each in a process of its own. ``run(steps)`` runs this number of steps, as
a training loop would that reads the loss at the end, waits for them and returns the last loss. ``close()``,
if there is one, ends the processes that the peer has started.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Literal

from benchmarks.host import Host
from benchmarks.workload import Setting


@dataclasses.dataclass(frozen=True)
class Peer:
    """A way to run the steps.

    Attributes:
      key: its name in the code, and on the command line.
      name: its name in tables.
      factory: the class that ``Host`` makes.
      devices: the number of CPU devices that JAX shows its process.
      threads: the threads its process may compute with: all cores, or a group's share of them. The actors
        and processes that a peer starts have their share in any case.
      needs: a package that is not installed with ours.
      rests: whether it takes processor time when it has nothing to do, unless ``rest()`` is called.
      on_ray: whether it starts actors.
      accelerated: whether it also runs on accelerators.
    """

    key: str
    name: str
    factory: str
    devices: Literal["one", "groups"] = "one"
    threads: Literal["all", "share"] = "all"
    needs: str = ""
    rests: bool = False
    on_ray: bool = False
    accelerated: bool = False

    def runs_on(self, setting: Setting) -> bool:
        """Whether its package is installed, and the machine has the devices that it needs."""
        setup = setting.setup
        if self.needs and importlib.util.find_spec(self.needs) is None:
            print(f"skips {self.name}: {self.needs} is not installed; pip install '.[bench]'")
            return False
        enough = self.devices == "one" or setup.devices >= setting.workload.groups
        return not setup.options.device or (self.accelerated and enough)

    def start(self, setting: Setting) -> Host:
        """Starts its process. The peer is set up once the host is ready."""
        devices = setting.workload.groups if self.devices == "groups" else 1
        threads = setting.setup.cores if self.threads == "all" else setting.share
        environment = setting.setup.environment(devices, threads)
        return Host(f"benchmarks.peers.{self.factory}", (setting,), environment, self.name)


PEERS = (
    Peer("jit", "jax.jit, one device", "ours:PlainJit", accelerated=True),
    Peer("seq", "seq: our executables, one thread", "baselines:Sequential", accelerated=True),
    Peer("thr", "thr: our executables, threads", "baselines:Threads"),
    Peer("spmd", "SPMD GPipe (shard_map)", "spmd_gpipe:SpmdGPipe", "groups"),
    Peer("in_process", "mpmd in process", "ours:InProcess", "groups", accelerated=True),
    Peer("in_process_inline", "mpmd in process, inline dispatch", "ours:InProcessInline", "groups"),
    Peer("on_ray", "mpmd on Ray", "ours:OnRay", on_ray=True, accelerated=True),
    Peer("ray_calls", "Ray, a call per task", "ray_by_hand:Calls", on_ray=True),
    Peer("ray_graph", "Ray, compiled graph", "ray_by_hand:CompiledGraph", rests=True, on_ray=True),
    Peer("torch", "torch 1F1B (gloo)", "torch_1f1b:Torch1F1B", needs="torch"),
)

PIPELINED = ("thr", "spmd", "ray_calls", "ray_graph", "torch")
"""Peers that run a pipeline of other making than ours."""

TASK_TIMES = Peer("tasks", "task times", "baselines:TaskTimes", threads="share", accelerated=True)
"""Measures how long each task takes when nothing disturbs it; it trains like ``seq``."""
