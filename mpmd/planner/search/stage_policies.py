"""Gives each stage a policy of rematerialisation: the cheapest one with which its group fits.

In 1F1B the first stages hold more microbatches than the last, so they may have to compute layers again where
the last have the memory to keep all. A group's memory depends on its own stages alone, so that groups with
one stage each get the fastest policies of a cut. The stages of a group have one policy.
"""

from __future__ import annotations

import dataclasses

from mpmd.planner.candidate import Candidate, Row
from mpmd.planner.search.candidates import best_of, cut_candidates
from mpmd.planner.search.formula import evaluate, group_memories
from mpmd.planner.search.orders import stages_in_flight
from mpmd.planner.search.search_space import SearchSpace


def may_have_policies(space: SearchSpace, candidate: Candidate) -> bool:
    return len(space.policies) > 1 and len(candidate.submeshes) > 1


def best_by_stage(space: SearchSpace, candidate: Candidate) -> Row | None:
    """An uncut candidate with its best cut for which each stage has a policy of its own."""
    cheapest, *others = space.policies
    cut = cut_candidates(space, dataclasses.replace(candidate, remat=cheapest), others)
    evaluations = [evaluate(space.model, with_policies(space, each)) for each in cut]
    return best_of(evaluations, space.model.cluster)


def with_policies(space: SearchSpace, candidate: Candidate) -> Candidate:
    """Returns a cut candidate with the cheapest policy for each group with which the group fits in memory.

    A group that fits with no policy gets the policy with which it lacks the least memory.
    """
    uniform = [dataclasses.replace(candidate, remat=policy) for policy in space.policies]
    by_policy = [group_memories(space.model, each) for each in uniform]
    chosen = []
    for memories in zip(*by_policy, strict=True):
        memory = space.model.cluster.pool(candidate.submeshes[memories[0].group].pool).memory
        missing = [max(0.0, each.total - memory) for each in memories]
        chosen.append(space.policies[missing.index(min(missing))][0])
    homes, _ = stages_in_flight(candidate.schedule, candidate.num_microbatches)
    return dataclasses.replace(candidate, remat=tuple(chosen[home] for home in homes))
