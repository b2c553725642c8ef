"""Predicts published steps by the planner's formulas, without a compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from benchmarks.published.facts import Fact
from benchmarks.published.model import profile_of
from mpmd.planner.candidate import Candidate
from mpmd.planner.hardware import Hardware
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.stages import CostModel
from mpmd.planner.submesh import Submesh
from mpmd.schedules import Interleaved1F1B, Std1F1B

_MICROBATCHES = (1, 2, 4, 8, 16)


class Predictor:
    """The step times of facts on clusters of their kinds of devices.

    Args:
      clusters: for each kind of device, the cluster of one node.
    """

    def __init__(self, clusters: Mapping[str, Hardware]):
        self._clusters = clusters
        self._models: dict[tuple[object, ...], CostModel] = {}

    def seconds(self, fact: Fact) -> float:
        """The predicted time of a step, of the best microbatch if that is not published."""
        return min(self._seconds(fact, microbatch) for microbatch in _microbatches(fact))

    def _seconds(self, fact: Fact, microbatch: int) -> float:
        shares = ((True, fact.recomputed), (False, 1 - fact.recomputed))
        return sum(
            share * evaluate(self._model(fact), candidate_of(fact, microbatch, remat)).seconds
            for remat, share in shares
            if share
        )

    def _model(self, fact: Fact) -> CostModel:
        """The costs of the fact's layers on as many nodes as it has."""
        key = (fact.group, fact.device, fact.devices, fact.slices, fact.model, fact.batch)
        if key not in self._models:
            cluster = self._clusters[fact.device]
            of_node = fact.devices // fact.slices if fact.slices else cluster.devices_per_node
            cluster = dataclasses.replace(
                cluster, nodes=-(-fact.devices // of_node), devices_per_node=of_node
            )
            profile = dataclasses.replace(profile_of(fact.model), rows=fact.batch)
            self._models[key] = CostModel(profile, cluster)
        return self._models[key]


def _microbatches(fact: Fact) -> Iterator[int]:
    """The rows of a replica's microbatch: the published number, or all numbers that the run may have used."""
    if fact.microbatch:
        yield fact.microbatch
        return
    for rows in _MICROBATCHES:
        if fact.batch // fact.data % rows == 0:
            yield rows


def candidate_of(fact: Fact, microbatch: int, remat: bool) -> Candidate:
    """The way in which a step ran, as the planner describes it."""
    stages = fact.pipeline * fact.chunks
    blocks, more = divmod(fact.model.layers, stages)
    assert not more, f"{fact.model.layers} blocks are not {stages} equal stages: {fact}"
    layers = [blocks] * stages
    layers[0] += 1  # the embedding
    layers[-1] += 1  # the head
    schedule = Std1F1B(fact.pipeline) if fact.chunks == 1 else Interleaved1F1B(stages, mpmd_dim=fact.pipeline)
    return Candidate(
        tuple(layers),
        (Submesh(data=fact.data, model=fact.tensor),) * fact.pipeline,
        schedule,
        fact.batch // fact.data // microbatch,
        remat,
        fact.fsdp,
    )
