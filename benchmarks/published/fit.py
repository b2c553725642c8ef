"""Fits the presets' rates of products: ``python -m benchmarks.published.fit --vtrain PATH``."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
from collections.abc import Sequence

from scipy.optimize import brentq

from benchmarks.published import typed_in
from benchmarks.published.facts import Fact
from benchmarks.published.fitted import fitted_third, presets
from benchmarks.published.predict import Predictor
from benchmarks.published.vtrain import read
from mpmd.planner.curves import Curve
from mpmd.planner.hardware import Hardware

BOUNDS = (0.5, 1.5)
"""The shares of a preset's rate among which the fitted rate is searched."""


def main() -> None:
    """Prints, for each device, the rate of products with which the median ratio of its fitted third is 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.fit", description=__doc__)
    parser.add_argument("--vtrain", type=pathlib.Path, required=True, help="a checkout of vTrain")
    fitted = fitted_third([*typed_in(), *read(parser.parse_args().vtrain)])
    for device, cluster in presets().items():
        facts = [fact for fact in fitted if fact.device == device]
        share = brentq(_median_miss, *BOUNDS, args=(cluster, facts), xtol=1e-3)
        print(f"{device}: product={share * cluster.flops:.3g}, fitted to {len(facts)} steps")


def _median_miss(share: float, cluster: Hardware, facts: Sequence[Fact]) -> float:
    """The median of predicted over measured, less 1, with a share of the cluster's rate of products."""
    name = "product bfloat16"
    curve = Curve(share * cluster.rates[name].rate, cluster.rates[name].half)
    scaled = dataclasses.replace(cluster, flops=share * cluster.flops, rates={**cluster.rates, name: curve})
    predictor = Predictor(dict.fromkeys([facts[0].device], scaled))
    return statistics.median(predictor.seconds(fact) / fact.seconds for fact in facts) - 1


if __name__ == "__main__":
    main()
