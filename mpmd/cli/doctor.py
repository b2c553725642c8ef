"""The command ``mpmd doctor``: it tries out the installation, and advises on faults."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpmd.cli import machine
from mpmd.cli.arguments import ExitCode, add_command
from mpmd.util.private_directory import fault_of
from mpmd.util.tables import human_bytes
from mpmd.version import __version__

TRIAL_SECONDS = 180

SHARED_MEMORY, LITTLE_SHARED_MEMORY = Path("/dev/shm"), 2**30
CACHE = Path("~/.cache/mpmd")
NO_DEVICES = (
    "JAX finds no devices: unset JAX_PLATFORMS if it is wrong, or install JAX for them as "
    "https://docs.jax.dev/en/latest/installation.html says"
)

UNUSED_GPUS = (
    "JAX does not use them: pip install 'jax[cuda12]' or 'jax[cuda13]', whichever the driver supports, and "
    "unset JAX_PLATFORMS"
)

OTHER_BITS = (
    "recovery, and Recovery(verify_every=...) above all, need executables that repeat their bits: on GPUs "
    "set XLA_FLAGS=--xla_gpu_deterministic_ops=true; on CPUs a device may be faulty"
)

FORMAT = "mpmd doctor 1"
"""The name and version of the JSON; the version changes when a field goes or changes its meaning."""

EXAMPLES = """\
examples:
  mpmd doctor
  mpmd doctor --no-ray
  mpmd doctor --address auto        on the Ray cluster of this machine
  mpmd doctor --json | jq .nodes    for programs

exit code: 0 if all is well, 1 if something has a fault; warnings are no
faults
"""


class Health(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    FAULT = "FAULT"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The state of one subject of ``mpmd doctor``, such as ``ports``.

    Attributes:
      found: one line for people, such as ``2 of cpu (cpu)``.
      remedy: one line of advice; empty where nothing is wrong.
      data: fields of the command's JSON, by name.
    """

    subject: str
    state: Health
    found: str
    remedy: str = ""
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "doctor", _doctor, "check the installation, devices and Ray", EXAMPLES)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--no-ray", action="store_true", help="start no actors")
    where.add_argument("--address", help="the Ray cluster to try; by default one is started on this machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object, when all was tried")


def _doctor(options: argparse.Namespace) -> int:
    listed = []
    for finding in findings(not options.no_ray, options.address):
        listed.append(finding)
        if not options.json:
            print(_text(finding), flush=True)  # at once, because a trial may take a minute
    faults = [finding.subject for finding in listed if finding.state is Health.FAULT]
    if options.json:
        print(json.dumps(as_json(listed), indent=2))
    else:
        print(f"\nnot well: {', '.join(faults)}" if faults else "\nall is well")
    return ExitCode.FAULT if faults else ExitCode.OK


def _text(finding: Diagnosis) -> str:
    line = f"{finding.state.value:7}  {finding.subject:20}  {finding.found}"
    return f"{line}\n{'':9}-> {finding.remedy}" if finding.remedy else line


def as_json(listed: Sequence[Diagnosis]) -> dict[str, Any]:
    """The findings for programs; ``docs/reference/the_command_line.md`` has the fields."""
    read: dict[str, Any] = {"devices": [], "gpus": [], "ports": None, "nodes": []}
    for finding in listed:
        read.update(finding.data)
    return {
        "format": FORMAT,
        "ok": all(finding.state is not Health.FAULT for finding in listed),
        "mpmd": __version__,
        "findings": [
            {
                "subject": finding.subject,
                "state": finding.state.name.lower(),
                "text": finding.found,
                "remedy": finding.remedy,
            }
            for finding in listed
        ],
        **read,
    }


def findings(on_ray: bool, address: str | None = None) -> Iterator[Diagnosis]:
    yield Diagnosis("mpmd", Health.OK, f"{__version__} in {Path(__file__).parents[1]}")
    yield from _shared_memory()
    yield from _cache()
    yield from _ports()
    devices = _trial("devices", "devices", remedy=NO_DEVICES)
    yield devices
    yield from _gpus(devices)
    yield _trial("two groups", "in-process", remedy="this is the smallest step there is; see the error above")
    if on_ray:
        yield _trial(
            "two actors",
            "ray",
            *([address] if address else []),
            remedy="Ray or the network between its processes is not well; `ray status` shows a cluster",
        )


def _shared_memory() -> Iterator[Diagnosis]:
    if SHARED_MEMORY.is_dir():
        size = shutil.disk_usage(SHARED_MEMORY).total
        little = size < LITTLE_SHARED_MEMORY
        yield Diagnosis(
            "shared memory",
            Health.WARNING if little else Health.OK,
            f"{human_bytes(size)} in {SHARED_MEMORY}",
            "groups of one node exchange messages there: give a container more (--shm-size)"
            if little
            else "",
        )


def _cache() -> Iterator[Diagnosis]:
    """Checks that no other user may write to the compilation cache, whose content is executed."""
    path = CACHE.expanduser()
    if not path.exists():
        yield Diagnosis("compilation cache", Health.OK, f"{path} is made by the first launch")
    elif fault := fault_of(str(path)):
        state, _, remedy = fault.partition(": ")
        yield Diagnosis("compilation cache", Health.FAULT, state, remedy)
    elif not os.access(path, os.W_OK):
        yield Diagnosis(
            "compilation cache",
            Health.WARNING,
            f"{path} cannot be written",
            "programs are compiled again by each run: launch(compilation_cache=...) names another directory",
        )
    else:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        yield Diagnosis("compilation cache", Health.OK, f"{human_bytes(size)} in {path}")


def _ports() -> Iterator[Diagnosis]:
    try:
        ports = machine.read_ports()
    except OSError as error:
        yield Diagnosis("ports", Health.FAULT, str(error), "processes have to be able to listen at 127.0.0.1")
        return
    chosen = "" if ports["first"] is None else f"{ports['first']} to {ports['last']} for connections; "
    listening = [str(port["port"]) for port in ports["ray"] if port["listens"]]
    ray = f"Ray listens at {', '.join(listening)}" if listening else "no Ray listens"
    yield Diagnosis("ports", Health.OK, f"{chosen}{ray}", data={"ports": ports})


def _gpus(devices: Diagnosis) -> Iterator[Diagnosis]:
    try:
        gpus = machine.read_gpus()
    except RuntimeError as error:
        yield Diagnosis(
            "gpus", Health.WARNING, str(error), "NVIDIA's driver does not answer: nvidia-smi shows it"
        )
        return
    if not gpus:
        return
    kinds = collections.Counter(f"{gpu['name']}, {human_bytes(gpu['memory_bytes'])}" for gpu in gpus)
    text = "; ".join(f"{count} of {kind}" for kind, count in kinds.items())
    unused = all(device["platform"] == "cpu" for device in devices.data.get("devices", ()))
    yield Diagnosis(
        "gpus", Health.WARNING if unused else Health.OK, text, UNUSED_GPUS if unused else "", {"gpus": gpus}
    )


def _trial(subject: str, *arguments: str, remedy: str) -> Diagnosis:
    # -P: a package `cluster` in the current directory is not ours.
    command = [sys.executable, "-P", "-m", "cluster.trial", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        return Diagnosis(subject, Health.FAULT, f"it has not ended within {TRIAL_SECONDS} s", remedy)
    if done.returncode:
        lines = _error_in(done.stderr) or [f"the process ended with {done.returncode}"]
        return Diagnosis(subject, Health.FAULT, f"\n{'':9}".join(lines), remedy)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    text, other_bits = result.pop("text"), result.pop("other_bits", None)
    if other_bits:
        return Diagnosis(subject, Health.WARNING, text, OTHER_BITS, result)
    return Diagnosis(subject, Health.OK, text, data=result)


def _error_in(text: str) -> list[str]:
    lines = text.strip().splitlines()[-3:]
    indented = [i for i, line in enumerate(lines) if line.startswith("  ")]
    return lines[indented[-1] + 1 :] or lines if indented else lines
