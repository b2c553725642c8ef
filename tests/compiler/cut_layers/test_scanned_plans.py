"""Plans of scanned layers: they do not grow with the layers, and each group has its share."""

import pytest

import mpmd
from tests.support.models import BATCH, CLIPPED_ADAM, WIDTH, batch, init, make_step, planned
from tests.support.programs.scanned_layers import model, stacked


def compiled_for(layers, **spread):
    step = make_step(model(**spread), mpmd.Std1F1B(4), CLIPPED_ADAM)
    return planned(step, init(stacked(layers), CLIPPED_ADAM), *batch(), groups=4).compiled


def plan_of(layers, **spread):
    return compiled_for(layers, **spread).program.plan


def bytes_of_stacks(plan):
    return [
        sum(leaf.aval.nbytes for leaf in plan.inputs if leaf.mpmd_idxs == (i,) and "layers" in leaf.path)
        for i in range(4)
    ]


def test_a_plan_does_not_grow_with_the_layers():
    small, large = plan_of(8, every=2), plan_of(64, every=16)
    assert len(small.executables) == len(large.executables)
    assert [len(p.instructions) for p in small.programs] == [len(p.instructions) for p in large.programs]
    first, *others = bytes_of_stacks(large)
    assert all(other == first for other in others) and first == 8 * bytes_of_stacks(small)[0]


def test_stages_of_as_many_layers_share_executables():
    def executables(plan):
        return {str(run.task): run.executable for program in plan.programs for run in program.runs}

    tasks = executables(plan_of(8, every=2))
    assert tasks["fwd_1__0"] == tasks["fwd_2__0"] != tasks["fwd_0__0"]
    assert tasks["bwd_1__0"] == tasks["bwd_2__0"]
    tasks = executables(plan_of(9, every=(2, 2, 3, 2)))
    assert tasks["fwd_1__0"] != tasks["fwd_2__0"]


@pytest.mark.slow
def test_a_group_needs_memory_for_its_own_layers_and_no_others():
    """By how much its worst moment grows with the layers: any other group's share of a stack would show."""
    weights, activations = 4 * (WIDTH**2 + WIDTH), 4 * BATCH * WIDTH  # bytes of a layer
    small, large = (compiled_for(4 * n, every=n).verified.live_bytes for n in (8, 32))
    for stage, (before, after) in enumerate(zip(small, large, strict=True)):
        in_flight = 4 - stage  # microbatches under 1F1B, of which each layer keeps its output
        state = 2 * 3 + 2  # weights and two moments, old and new, gradients, and updates in the making
        assert (after - before) / (32 - 8) <= state * weights + in_flight * activations
