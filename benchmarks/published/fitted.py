"""The clusters of published steps, and the steps to which the presets' rates of products are fitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.published.facts import Fact
from benchmarks.published.gpus import TORCHTITAN
from benchmarks.published.tpus import MAXTEXT
from benchmarks.published.vtrain import NODES
from mpmd.planner.cluster import Cluster
from mpmd.planner.hardware import Hardware

PRESET_OF = {"a100": "a100-80gb", "h100": "h100", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e"}
"""The preset of each kind of device that facts name."""

FITTED_GROUP = {"a100": NODES, "h100": TORCHTITAN} | MAXTEXT
"""The group of facts to a third of which the rate of products of each device is fitted."""

THIRD = 3


def presets() -> Mapping[str, Hardware]:
    """``Cluster.preset`` of one node for each kind of device, as users have it."""
    return {device: Cluster.preset(name) for device, name in PRESET_OF.items()}


def fitted_third(facts: Iterable[Fact]) -> frozenset[Fact]:
    """The facts to which rates may be fitted: every third line of a device's group, in the table's order."""
    facts = list(facts)
    chosen: set[Fact] = set()
    for device, group in FITTED_GROUP.items():
        chosen.update([fact for fact in facts if (fact.group, fact.device) == (group, device)][::THIRD])
    return frozenset(chosen)
