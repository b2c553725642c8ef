"""Profiles of steps that never ran: drawn times, with a slow group, slow tasks and slow messages."""

from __future__ import annotations

import random

from mpmd.ir.plan import AnyTask, Plan
from mpmd.ir.reshard import GroupShape
from mpmd.ir.routes import Topology
from mpmd.profile.profile import Profile
from tests.support.recorded_steps import Timing, recorded_step, unit_time


def drawn_profile(
    plan: Plan, seed: int = 0, slow_group: int = 1, steps: int = 1, name: str = "node"
) -> Profile:
    """A profile of a plan; the tasks of the slow group take 1.3 times as long as those of others.

    Args:
      name: of the node, and of a function that all executables run.
    """
    rng = random.Random(seed)

    def duration(group: int, task: AnyTask) -> int:
        slow = 3 if rng.random() < 0.01 else 1
        return int(
            unit_time(group, task) * slow * rng.lognormvariate(0, 0.04) * (1.3 if group == slow_group else 1)
        )

    timing = Timing(
        duration=duration,
        processor=lambda group, task: 0.75,
        flight=lambda edge: rng.randrange(20_000, 200_000),
        handling=lambda: rng.randrange(5_000, 40_000),
        received=lambda group: rng.randrange(50_000, 300_000),
        arguments=lambda group: rng.randrange(50_000, 500_000),
        reply=100_000,
    )
    return Profile(
        plan=plan,
        topology=Topology(tuple(GroupShape({}) for _ in plan.programs)),
        recorded=tuple(recorded_step(plan, timing, 10**9 * (i + 1), name) for i in range(steps)),
        sources={each.name: ("model.py:12 layer", name) for each in plan.executables},
        compile_seconds={"trace": 0.12, "split": 0.05, "lower": 0.31, "load": 2.1},
        updated=frozenset(leaf.name for leaf in plan.inputs if leaf.donated and leaf.name),
    )
