"""The section of what is installed and found: the findings of ``mpmd doctor``, and the devices' own words."""

from __future__ import annotations

import dataclasses

import jax

from benchmarks.device.outcome import Findings
from benchmarks.device.settings import Settings
from benchmarks.measure import Table
from mpmd.cli.doctor import Finding, State, findings
from mpmd.util.tables import human_bytes


def run(settings: Settings) -> Findings:
    """Without the trial on Ray, which later sections use anyway."""
    found = list(findings(on_ray=False))
    devices = [
        (str(device), device.device_kind, memory_of(device), ", ".join(kinds_of(device)))
        for device in jax.devices()
    ]
    tables = (
        Table("mpmd doctor", ("", "state", ""), tuple(map(row_of, found))),
        Table("Devices", ("device", "kind", "memory", "kinds of memory"), tuple(devices)),
        Table("JAX", ("", "value"), (("platform", jax.devices()[0].client.platform_version.strip()),)),
    )
    data = [{**dataclasses.asdict(finding), "state": finding.state.value} for finding in found]
    faults = (f"{each.subject}: {each.found}" for each in found if each.state is State.FAULT)
    return Findings(tables, {"doctor": data, "devices": devices}, tuple(faults))


def row_of(finding: Finding) -> tuple[str, ...]:
    """A finding on one line."""
    text = f"{finding.found} -> {finding.remedy}" if finding.remedy else finding.found
    return finding.subject, finding.state.value, " ".join(text.split()).replace("|", "/")


def memory_of(device: jax.Device) -> str:
    """The bytes that the allocator may take, if there is one that counts."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return "not counted" if limit is None else human_bytes(limit)


def kinds_of(device: jax.Device) -> list[str]:
    """The kinds of memory that arrays can be in."""
    return sorted(memory.kind for memory in device.addressable_memories())
