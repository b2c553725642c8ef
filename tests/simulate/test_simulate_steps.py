"""What is simulated of a compiled plan is what is simulated of its schedule."""

import mpmd
from mpmd.ir.plan import OutsideTask
from mpmd.simulate import Costs, simulate
from mpmd.verify import verify
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of


def compile_for(schedule, microbatches):
    with mesh_of(schedule.mpmd_dim) as mesh:
        step = mpmd.jit(make_step(mse, schedule), mpmd_mesh=mesh)
        return step.compile(init(weights(schedule.num_stages)), *batch(microbatches))


def test_a_plan_and_its_schedule_take_the_same_time():
    schedule = mpmd.Interleaved1F1B(4, 2)
    plan = compile_for(schedule, 5).plan
    simulated = simulate(plan)
    expected = simulate(schedule.tasks(5), Costs(atomic=True))
    in_loop = tuple(event for event in simulated.events if not isinstance(event.activity, OutsideTask))
    assert in_loop == expected.events
    assert (simulated.makespan, simulated.bubble) == (expected.makespan, expected.bubble)
    without_messages, with_all = verify(plan).live_bytes, [group.peak_bytes for group in verify(plan).memory]
    for live, peak, most in zip(without_messages, simulated.peaks, with_all, strict=True):
        assert live <= peak <= most
