"""Schedules whose cells run several tasks as one executable."""

import dataclasses

import pytest

import mpmd
from mpmd.ir.plan import FusedTask, Task
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import assert_parity, mesh_of


@dataclasses.dataclass(frozen=True)
class Together(mpmd.Schedule):
    """Runs the same task of several microbatches at once."""

    parts: tuple[tuple[int, ...], ...]

    def tasks(self, num_microbatches):
        return [
            [
                FusedTask(tuple(Task(kind, stage, i) for i in part))
                for kind, parts in (("fwd", self.parts), ("bwd", self.parts[::-1]))
                for part in parts
            ]
            for stage in range(self.num_stages)
        ]


@pytest.mark.parametrize("parts", [((3, 0), (1, 2))])
def test_every_microbatch_of_a_cell_is_accumulated(parts):
    step = make_step(mse, Together(2, 2, parts))
    assert_parity(step, init(weights(2)), *batch(4), mesh=mesh_of(2))
