"""The environment variables on which the bits of results depend. JAX reads them when it is imported."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Mapping, MutableMapping

from mpmd.replay.record import TaskRecord
from mpmd.validation import shown

COUNT_FLAG = "--xla_force_host_platform_device_count"

_COUNT = re.compile(rf"{COUNT_FLAG}=\S*")

_FLAG = re.compile(r"--(xla_\w+)(=[\w.,+-]*)?")
_OF_FILES = re.compile("cache|dir|dump|extra_options|file|path|_(from|to)$")


def variables_of(record: TaskRecord, here: Mapping[str, str], jaxlib: str) -> dict[str, str]:
    """The variables to set before JAX is imported, so that a task has the bits that it had on its group.

    Args:
      here: the environment.
      jaxlib: the version of jaxlib. Another one than the group's may not know the group's options.
    """
    flags = [_COUNT.sub("", here.get("XLA_FLAGS", ""))]
    variables: dict[str, str] = {}
    if re.fullmatch(r"[0-9]{1,4}", record.environment.get("NPROC", "")):
        variables["NPROC"] = record.environment["NPROC"]
    if jaxlib == record.versions.get("jaxlib"):
        flags.append(" ".join(flags_of(record)))
    flags.append(f"{COUNT_FLAG}={record.num_devices}")
    variables["XLA_FLAGS"] = " ".join(dict.fromkeys(" ".join(flags).split()))
    if record.platform == "cpu":
        variables["JAX_PLATFORMS"] = "cpu"
    return variables


def flags_of(record: TaskRecord) -> list[str]:
    """The options of XLA that a task's group had, without options that name files.

    A directory may be of somebody else, and XLA writes files and runs programs where options say so.
    """
    flags = _COUNT.sub("", record.environment.get("XLA_FLAGS", "")).split()
    matches = [match for flag in flags if (match := _FLAG.fullmatch(flag))]
    return [match[0] for match in matches if not _OF_FILES.search(match[1])]


def prepare(record: TaskRecord, environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Sets the variables for a task, and returns them; does nothing where JAX has been imported.

    Raises: ``ValueError`` for options that XLA does not know.
    """
    if "jax" in sys.modules:
        return {}
    variables = variables_of(record, environment, importlib.metadata.version("jaxlib"))
    _check_flags(_COUNT.sub("", variables["XLA_FLAGS"]), environment)
    environment.update(variables)
    environment.pop("JAX_NUM_CPU_DEVICES", None)  # which JAX refuses beside the flag
    return variables


def _check_flags(flags: str, environment: Mapping[str, str]) -> None:
    """Raises ``ValueError`` for options at which XLA would end this process, with exit code 1."""
    if not flags.strip():
        return
    start = [sys.executable, "-c", "import jax; jax.devices()"]
    variables = {**environment, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(start, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"JAX does not start with XLA_FLAGS={flags.strip()}: {shown(done.stderr)}")
