"""The claims of the Workshop guide, as assertions on steps that ran."""

import dataclasses
from collections.abc import Callable, Mapping

from workshop_measure import Result

HALF = 0.5
"""The share of the peak memory that checkpointing leaves, at most: the guide has 5 of 10 GB."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence of the guide on several strategies.

    Attributes:
      names: the strategies that it compares.
      quantity: of their results; a time is compared only where steps were timed.
      limit: how many times that of the second one the first one's is, at most.
    """

    text: str
    names: tuple[str, str]
    quantity: Callable[[Result], float | None]
    limit: float = 1.0


def residuals(result: Result) -> float:
    return result.residual_bytes


def peak(result: Result) -> float:
    return result.peak_bytes


def seconds(result: Result) -> float | None:
    return result.seconds


def slowest_stage(result: Result) -> float:
    return max(result.stage_seconds)


CLAIMS = (
    Claim("1F1B keeps fewer residuals than GPipe", ("pipeline, 1F1B", "pipeline, GPipe"), residuals),
    Claim("checkpointing halves the peak memory", ("full checkpointing", "pipeline, 1F1B"), peak, HALF),
    Claim("checkpointing takes time", ("pipeline, 1F1B", "full checkpointing"), seconds),
    Claim("selective checkpointing needs less", ("selective checkpointing", "pipeline, 1F1B"), peak),
    Claim("and less time than full", ("selective checkpointing", "full checkpointing"), seconds),
    Claim("accumulation needs less than the whole batch", ("accumulation", "whole batch"), peak),
    Claim("FSDP needs less than replicas of the weights", ("FSDP", "data"), peak),
    Claim("do not divide tensors over too many devices", ("data 4, tensor 2", "tensor 8"), seconds),
    Claim("prefer few large microbatches", ("4 microbatches", "16 microbatches"), seconds),
    Claim("more stages, less memory of each device", ("pipeline, 1F1B", "2 stages"), peak),
    Claim("rebalanced stages are faster", ("rebalanced", "imbalanced"), seconds),
    Claim("and the slowest of them is", ("rebalanced", "imbalanced"), slowest_stage),
    Claim("what is selected for less memory needs less", ("selected, less memory", "selected"), peak),
)


def check_claims(results: Mapping[str, Result], noise: float) -> None:
    """Prints the numbers behind each claim on strategies that ran, and raises if a claim does not hold.

    The selected strategy is to be no slower than any other one.

    Args:
      noise: the factor by which a time may be off, on a machine with other work.
    """
    claims = [*CLAIMS]
    if "selected" in results:
        others = [name for name in results if not name.startswith("selected")]
        claims += [
            Claim("the selected strategy is the fastest", ("selected", name), seconds) for name in others
        ]
    failures = []
    print("\nWhat the guide says:")
    for claim in claims:
        if not set(claim.names) <= set(results):
            continue
        first, second = (claim.quantity(results[name]) for name in claim.names)
        if first is None or second is None:
            continue
        limit = claim.limit * (noise if claim.quantity in (seconds, slowest_stage) else 1)
        ratio = f"{claim.names[0]} / {claim.names[1]} = {first / second:.2f} (limit {limit:.2f})"
        print(f"{claim.text}: {ratio}")
        if not first < limit * second:
            failures.append(f"{claim.text}: {ratio}")
    if failures:
        raise AssertionError("this does not hold here:\n  " + "\n  ".join(failures))
