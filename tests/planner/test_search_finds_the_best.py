"""The search against simulating every candidate, for random layers on small clusters."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.language.remat import Remat
from mpmd.planner.all_reduces import AllReduces
from mpmd.planner.cluster import Cluster
from mpmd.planner.constraints import Constraints
from mpmd.planner.layer_profile import Division
from mpmd.planner.search.exhaustive import is_small
from mpmd.planner.search.search import evaluated_rows, search, search_space
from mpmd.planner.search.stages import CostModel
from mpmd.simulate import Link
from tests.support.brute_force import brute_force
from tests.support.profiles import layer, profile


def random_problem(seed, most_layers, most_devices):
    """Layers and a cluster, with memory that is sometimes scarce and links that are sometimes slow.

    The devices of every fourth cluster share cores.
    """
    draw = random.Random(seed)
    parts = []
    for _ in range(draw.randint(2, most_layers)):
        weights, summed = 10**6 * draw.randint(0, 100), 1e6 * draw.randint(0, 5)
        divisions = {
            "data": Division(1, 1.0, 0.0, 1.0, received=1.0, reduced_per_step=float(weights)),
            "model": Division(2, 1.0, 1.0, 0.5, 0.0, AllReduces(summed), AllReduces(summed)),
        }
        operations, entering = 1e9 * draw.randint(1, 50), 10**6 * draw.randint(0, 4)
        residuals = 10**6 * draw.randint(0, 20)
        parts.append(layer("", operations, None, weights, entering, residuals, divisions))
    needed = 4 * sum(part.weights for part in parts) + 100e6
    devices = draw.randint(1, most_devices)
    cluster = Cluster(
        nodes=1,
        devices_per_node=devices,
        memory=draw.choice([0.2, 0.3, 0.6, 1.0, 10.0]) * needed,
        flops=1e12,
        memory_bandwidth=1e12,
        device_link=Link(draw.choice([1e-6, 1e-3]), draw.choice([1e9, 1e11])),
        node_link=Link(1e-3, 1e9),
        task_overhead=draw.choice([0.0, 1e-3]),
        alone=1.0 if seed % 4 else devices / min(devices, 2),
    )
    return profile(tuple(parts), rows=draw.choice([2, 4])), cluster, draw.random() < 0.5


def with_slow_devices(cluster):
    """The cluster with at most two devices, and one more that is slower and has more memory."""
    fast = dataclasses.replace(cluster, devices_per_node=min(2, cluster.devices_per_node), kind="fast")
    slow = {"devices_per_node": 1, "flops": cluster.flops / 3, "memory": 2 * cluster.memory, "kind": "slow"}
    return Cluster.of([fast, dataclasses.replace(cluster, **slow)], link=cluster.device_link)


def best_seconds(made, cluster, constraints, exhaustive=True):
    """The predicted seconds of the best candidate; ``None`` where nothing fits."""
    try:
        return search(made, cluster, constraints, exhaustive)[0].prediction.seconds
    except ValueError as error:
        assert "does not fit" in str(error)
        return None


@pytest.mark.parametrize("kinds", [1, 2])
@settings(max_examples=settings.default.max_examples // 6)
@given(seed=st.integers(0, 10_000))
def test_what_is_exact_is_the_best_of_all(kinds, seed):
    made, cluster, remat = random_problem(seed, most_layers=3, most_devices=3)
    fsdp = (False, True) if cluster.devices_per_node > 1 else (False,)
    if kinds == 2:
        cluster = with_slow_devices(cluster)
    best = brute_force(CostModel(made, cluster), (remat,), fsdp)
    seconds = best_seconds(made, cluster, Constraints(remat=(Remat.of(remat),)))
    assert (seconds is None) == (best is None)
    if seconds is not None:
        assert is_small(search_space(made, cluster, Constraints(remat=(Remat.of(remat),))))
        assert seconds == pytest.approx(best.seconds, rel=1e-9)


def ratios_to_the_best(seeds, **sizes):
    """The steps of the search without looking at all candidates, over the best of all."""
    ratios = []
    for seed in seeds:
        made, cluster, remat = random_problem(seed, **sizes)
        constraints = Constraints(remat=(Remat.of(remat),))
        best = best_seconds(made, cluster, constraints)
        approximate = best_seconds(made, cluster, constraints, exhaustive=False)
        assert (best is None) == (approximate is None), f"seed {seed}"
        if best is not None and is_small(search_space(made, cluster, constraints)):
            ratios.append(approximate / best)
    return ratios


@pytest.mark.parametrize(
    ("seeds", "least", "layers", "devices"),
    [
        (range(3), 1, 6, 4),
        pytest.param(range(10), 6, 6, 4, marks=pytest.mark.slow),
        pytest.param(range(280, 380), 40, 7, 4, marks=pytest.mark.slow),
        pytest.param(range(200, 280), 40, 6, 4, marks=pytest.mark.slow),
        pytest.param(range(400, 470), 30, 6, 8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
def test_what_is_approximate_is_within_two_percent_nearly_always(seeds, least, layers, devices):
    ratios = ratios_to_the_best(seeds, most_layers=layers, most_devices=devices)
    assert len(ratios) >= least
    assert sum(ratio > 1.02 for ratio in ratios) <= len(ratios) / 8
    assert max(ratios) <= 1.1


def test_looking_at_all_candidates_stops_at_the_bound():
    made, cluster, _ = random_problem(8, most_layers=6, most_devices=4)
    space = search_space(made, cluster, Constraints())
    assert is_small(space)
    assert len(evaluated_rows(space)) < 500
