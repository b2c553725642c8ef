"""The clusters of published steps, and the steps to which the presets' rates of products are fitted.

A preset's rate of products is the one with which the median of predicted over measured was 1 on the fitted
third of its group; docs/planning/accuracy.md has the medians now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.published.facts import Fact
from benchmarks.published.gpus import TORCHTITAN
from benchmarks.published.tpus import MAXTEXT
from benchmarks.published.vtrain import NODES
from mpmd.planner.cluster import Cluster
from mpmd.planner.hardware import Hardware

PRESETS = {"a100": "a100-80gb", **{name: name for name in ("h100", "h100-sxm", "v5e", "v5p", "v6e")}}
"""The preset of each kind of device that facts name."""

FITTED_GROUP = {"a100": NODES, "h100": TORCHTITAN} | MAXTEXT
"""The group of facts to a third of which the rate of products of each device is fitted."""

THIRD = 3


def presets() -> Mapping[str, Hardware]:
    """``Cluster.preset`` of one node for each kind of device, as users have it."""
    return {device: Cluster.preset(name) for device, name in PRESETS.items()}


def fitted_third(facts: Iterable[Fact]) -> frozenset[Fact]:
    """The facts to which rates may be fitted: every third line of a device's group, in the table's order."""
    facts = list(facts)
    chosen: set[Fact] = set()
    for device, group in FITTED_GROUP.items():
        chosen.update([fact for fact in facts if (fact.group, fact.device) == (group, device)][::THIRD])
    return frozenset(chosen)
