"""The errors that are expected of predicted times, by the source of the numbers. No JAX."""

from __future__ import annotations

import types
from collections.abc import Mapping

EXPECTED_ERRORS: Mapping[str, float] = types.MappingProxyType(
    {"formula": 0.07, "simulation": 0.05, "measurement": 0.03}
)
"""The mean of the miss of a step's time, as a share of that time.

``formula``: 6.4% on average by the preset, of 109 iterations of 64 to 512 A100 with models of 3.6B to 175B
parameters that vTrain has published (Bang et al., "vTrain: A Simulation Framework for Evaluating
Cost-effective and Compute-optimal Large Language Model Training", 2023, arXiv:2312.12391).

``simulation``, ``measurement``: the ratios of predicted to measured times in the table of docs/planner.md,
and their mean distance from the mean of their seven rows, where groups are as many and in the same place:
4.8% of the 28 steps by the work of their plans, and 3.1% of the 14 in process by measured tasks. A part that
all rows of a table have in common, such as a rate that is too high, decides nothing between rows, so it is
not in these numbers.
"""
