"""The settings of a section: the devices of this machine, and how much to do."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

from benchmarks.workload import available_cores
from cluster.start.environment import PREALLOCATE, actor_environment
from cluster.start.shapes import GPU_PLATFORMS

CPU_DEVICES = 8
FIND = """
import json, jax
d = jax.devices()
version = d[0].client.platform_version.lower()
gpu = "rocm" if "rocm" in version else "cuda"
print(json.dumps([gpu if d[0].platform == "gpu" else d[0].platform, d[0].device_kind, len(d)]))
"""
"""Finds devices in a process that ends: as long as one has them, no other may be able to."""
FIND_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a section.

    Attributes:
      platform: JAX's name, such as ``cuda``.
      kind: of the devices, as JAX calls it.
      devices: how many there are.
      quick: the smallest sizes, which say that a section works, and nothing about speed.
      seconds: that the section may take.
    """

    platform: str
    kind: str
    devices: int
    quick: bool
    seconds: float = 60.0

    @property
    def is_gpu(self) -> bool:
        return self.platform in GPU_PLATFORMS

    def gpus_of(self, groups: int) -> float:
        """The GPUs of each group of one device on Ray: one, or a part where there are too few."""
        if self.is_gpu and self.devices >= groups:
            return 1
        return min(1 / groups, 0.25)

    def environment(self) -> dict[str, str]:
        """The variables of the process of a section."""
        if self.platform == "cpu":
            return actor_environment({}, "", "cpu", self.devices, available_cores())
        platforms = {"JAX_PLATFORMS": f"{self.platform},cpu"}
        # The processes of groups need memory beside it.
        return platforms | {PREALLOCATE: "false"} if self.is_gpu else platforms


def find(platform: str | None, quick: bool) -> Settings | None:
    """The settings for the accelerators of this machine, or for ``platform``; ``None`` if JAX finds none.

    On CPUs sizes are always the smallest: it is the command that is tried out there.

    Raises: ``RuntimeError`` with JAX's words when JAX cannot start.
    """
    if platform == "cpu":
        return Settings("cpu", "cpu", CPU_DEVICES, quick=True)
    environment = dict(os.environ) | ({"JAX_PLATFORMS": platform} if platform else {})
    command = [sys.executable, "-c", FIND]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FIND_SECONDS, env=environment)
    if done.returncode:
        raise RuntimeError(f"JAX finds no devices:\n{done.stderr.strip()[-2000:]}")
    return settings_of(done.stdout, quick)


def settings_of(output: str, quick: bool) -> Settings | None:
    """The devices that ``FIND`` has printed on its last line."""
    platform, kind, devices = json.loads(output.strip().splitlines()[-1])
    return None if platform == "cpu" else Settings(platform, kind, devices, quick)
