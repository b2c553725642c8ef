"""Why a candidate does not run, or is not the best, in one line. No JAX."""

from __future__ import annotations

import statistics

from mpmd.planner.candidate import Prediction
from mpmd.planner.hardware import Cluster
from mpmd.tables import human_bytes


def shortage(prediction: Prediction, cluster: Cluster) -> str:
    """What is missing of memory; empty for a candidate that fits."""
    memory = prediction.memory
    if memory.total <= cluster.memory:
        return ""
    parts = {
        name: getattr(memory, name)
        for name in ("weights", "gradients", "state", "residuals", "messages", "temporaries")
    }
    largest = max(parts, key=lambda name: parts[name])
    return (
        f"does not fit: needs {human_bytes(memory.total)} of {human_bytes(cluster.memory)}, "
        f"{human_bytes(parts[largest])} for {largest}"
    )


def slower_because(prediction: Prediction, best: Prediction) -> str:
    """What makes a candidate slower than the best: where it loses the largest share of its time."""
    ratio = prediction.seconds / best.seconds if best.seconds else 1.0
    if ratio < 1.005:
        return "as fast"
    lost = {
        f"sums over devices take {prediction.communication:.0%}": prediction.communication
        - best.communication,
        _bubble_text(prediction): prediction.bubble - best.bubble,
    }
    cause = max(lost, key=lambda text: lost[text])
    slower = f"{ratio:.2f} times the best"
    if lost[cause] > 0.01:
        return f"{slower}: {cause}"
    return f"{slower}: it computes more, or less at once"


def _bubble_text(prediction: Prediction) -> str:
    """The share of waiting, with the stage that causes it if stages differ."""
    text = f"bubble {prediction.bubble:.0%}"
    times = prediction.stage_seconds
    mean = statistics.fmean(times) if times else 0.0
    if mean and max(times) > 1.1 * mean:
        text += f", slowest stage {max(times) / mean:.1f} times the mean"
    return text
