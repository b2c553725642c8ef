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

``simulation``, ``measurement``: the mean distance of the ratios of predicted to measured times from the mean
of the seven rows of the chain, on as many groups in the same place; rounded up from an earlier run.
docs/planning/accuracy.md has 2.9% by simulation (28 steps), and 2.3% in process by measured tasks (14).
A part that all rows of a table have in common, such as a rate that is too high, decides nothing between rows,
so it is not in these numbers.
"""

MEMORY_ERROR = 0.08
"""The largest error of the predicted memory of a group's process, as a share of the measured memory."""
