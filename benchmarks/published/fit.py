"""Fits the curves of ``fitted.py``: ``python -m benchmarks.published.fit --vtrain PATH``."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from benchmarks.published import typed_in
from benchmarks.published.facts import Fact
from benchmarks.published.fitted import A100, DEVICES, FITTED, Curves, fitted_third, way_of
from benchmarks.published.predict import Predictor
from benchmarks.published.vtrain import ONE_NODE, read

LARGE_MISS, TOWARDS_START, EVALUATIONS = 0.1, 0.02, 20

# No rate is above the datasheet's; the start has to be below.
MOST = {
    "product": A100.peak,
    "memory": A100.memory,
    "link": A100.nvlink,
    "node_link": A100.node_link,
    **{name: sheet.peak for name, sheet in DEVICES.items()},
}


def main() -> None:
    """Prints the numbers that minimise the misses of the facts of ``fitted_third``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.fit", description=__doc__)
    parser.add_argument("--vtrain", type=pathlib.Path, required=True, help="a checkout of vTrain")
    facts = sorted(fitted_third([*typed_in(), *read(parser.parse_args().vtrain)]), key=repr)
    names = [field.name for field in dataclasses.fields(Curves)]
    start = np.log(dataclasses.astuple(FITTED))
    some = [*_least_and_most(facts), *(fact for fact in facts if fact.group != ONE_NODE)]
    fitted = least_squares(
        lambda numbers: np.append(_misses(numbers, some), TOWARDS_START * (numbers - start)),
        start,
        loss="soft_l1",
        f_scale=LARGE_MISS,
        diff_step=1e-2,
        max_nfev=EVALUATIONS,
        bounds=(-np.inf, [np.log(MOST.get(name, np.inf)) for name in names]),
    )
    for name, number in zip(names, np.exp(fitted.x), strict=True):
        print(f"    {name}={number:.3g},")


def _least_and_most(facts: Sequence[Fact]) -> list[Fact]:
    """The smallest and the largest step of each way on one node; the other steps follow from these two."""
    ways: dict[tuple[int, ...], list[Fact]] = {}
    for fact in facts:
        if fact.group == ONE_NODE:
            ways.setdefault(way_of(fact), []).append(fact)
    size = lambda fact: (fact.model.layers, fact.batch)  # noqa: E731
    return [chosen for way in ways.values() for chosen in (min(way, key=size), max(way, key=size))]


def _misses(numbers: np.ndarray, facts: Sequence[Fact]) -> np.ndarray:
    """The logarithm of predicted over measured for each fact."""
    predictor = Predictor(Curves(*map(float, np.exp(numbers))).clusters)
    return np.log([predictor.seconds(fact) / fact.seconds for fact in facts])


if __name__ == "__main__":
    main()
