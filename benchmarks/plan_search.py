"""The time of a search for a plan: ``python -m benchmarks.plan_search``.

Seconds are of processor time, on one core; the memory is the most that the process has had so far.
"""

from __future__ import annotations

import resource
import time

from benchmarks.measure import Table
from mpmd.planner.constraints import Constraints
from mpmd.planner.reasons import ranked
from mpmd.planner.search.search import USUAL, evaluated_rows, search_space
from tests.support.profiles import a100s, gpt


def main() -> None:
    """Searches for transformers as GPT-3's, on clusters of A100, from small to large."""
    rows = []
    for layers, width, nodes in (
        (24, 2048, 1),
        (48, 6144, 8),
        (96, 12288, 16),
        (96, 12288, 64),
        (96, 12288, 128),
    ):
        made, cluster = gpt(num_layers=layers, width=width, heads=width // 128), a100s(nodes)
        start = time.process_time()
        evaluated = evaluated_rows(search_space(made, cluster, Constraints()), USUAL)
        seconds = time.process_time() - start
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        devices = nodes * cluster.devices_per_node
        numbers = (str(layers), str(devices), str(len(evaluated)), f"{seconds:.1f}", f"{megabytes:.0f}")
        rows.append((*numbers, f"{ranked(evaluated, cluster, 1)[0].prediction.seconds:.2f}"))
    header = ("layers", "devices", "simulated", "s", "MiB", "predicted step, s")
    print(Table("Search for a plan", header, tuple(rows)))


if __name__ == "__main__":
    main()
