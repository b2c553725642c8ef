"""The environment variables on which the bits of results depend. JAX reads them when it is imported."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, MutableMapping

from mpmd.replay.record import TaskRecord

COUNT_FLAG = "--xla_force_host_platform_device_count"

_COUNT = re.compile(rf"{COUNT_FLAG}=\S*")


def variables_of(record: TaskRecord, here: Mapping[str, str], jaxlib: str) -> dict[str, str]:
    """The variables to set before JAX is imported, so that a task has the bits that it had on its group.

    Args:
      here: the environment.
      jaxlib: the version of jaxlib. Another one than the group's may not know the group's options.
    """
    flags = [_COUNT.sub("", here.get("XLA_FLAGS", ""))]
    variables: dict[str, str] = {}
    if "NPROC" in record.environment:
        variables["NPROC"] = record.environment["NPROC"]
    if jaxlib == record.versions.get("jaxlib"):
        flags.append(_COUNT.sub("", record.environment.get("XLA_FLAGS", "")))
    flags.append(f"{COUNT_FLAG}={record.num_devices}")
    variables["XLA_FLAGS"] = " ".join(dict.fromkeys(" ".join(flags).split()))
    if record.platform == "cpu":
        variables["JAX_PLATFORMS"] = "cpu"
    return variables


def prepare(record: TaskRecord, environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Sets the variables for a task, and returns them; does nothing where JAX has been imported."""
    if "jax" in sys.modules:
        return {}
    variables = variables_of(record, environment, importlib.metadata.version("jaxlib"))
    environment.update(variables)
    environment.pop("JAX_NUM_CPU_DEVICES", None)  # which JAX refuses beside the flag
    return variables
