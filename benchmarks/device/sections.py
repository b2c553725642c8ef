"""The table of sections, in the order in which they are run."""

from __future__ import annotations

from functools import partial

from benchmarks.device import (
    bits,
    conformance,
    curves,
    gpt,
    installed,
    memory,
    recovery,
    several_devices,
    trace,
    transports,
)
from benchmarks.device.outcome import Section
from cluster.transports.choice import DEVICE, NETWORK

SECTIONS = (
    Section("installed", "What is installed and found", 35, installed.run),
    Section("gpt", "A small GPT beside plain jax.jit", 95, gpt.run),
    Section("curves", "Curves for the planner", 40, curves.run),
    Section("trace", "A profile from the device", 30, trace.run),
    Section("memory", "Planned memory and the allocator's", 40, memory.run),
    Section("bits", "Bits, repeated", 55, bits.run),
    Section("network", "Messages by TCP", 30, partial(transports.run, transport=NETWORK)),
    Section("device", "Messages between devices", 30, partial(transports.run, transport=DEVICE)),
    Section("several-devices", "Groups of several devices", 30, several_devices.run),
    Section("recovery", "Recovery of a killed process", 40, recovery.run),
    Section("conformance", "Programs on groups that share a device", 250, conformance.run),
)
"""The last one stops when its time is up. It gets what the others leave, 150 s at least."""
