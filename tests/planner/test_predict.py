"""The memory of a plan's messages."""

import mpmd
from mpmd.memory import Holding
from mpmd.planner.trials.predict import memories_of
from tests.support.small_plans import lowered


def test_messages_are_where_the_cluster_has_them():
    step = lowered(mpmd.Std1F1B(2), [{"data": 1}] * 2)
    receiver, elsewhere = (
        [
            memory.peak.messages
            for memory in memories_of(step.plan, step.compiled.verified.arrivals, holding, ())
        ]
        for holding in (Holding.RECEIVER, Holding.ELSEWHERE)
    )
    assert sum(receiver) > sum(elsewhere) == 0
