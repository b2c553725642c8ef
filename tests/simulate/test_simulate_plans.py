"""Simulated plans: what runs outside the loop, what messages carry, and bytes held over time."""

import pytest

from mpmd.ir.events import Event
from mpmd.ir.plan import (
    Aval,
    Free,
    GroupProgram,
    InputLeaf,
    OutputLeaf,
    OutsideTask,
    Plan,
    Recv,
    Send,
    parse_task,
)
from mpmd.ir.reshard import GroupShape
from mpmd.ir.routes import Topology
from mpmd.simulate import Costs, Gap, Link, simulate
from mpmd.verify import verify
from tests.support.plans import executable, run_of

LATENCY = Link(latency=0.25)
VECTOR = Aval((4,), "float32", 4)


def plan_of(programs, inputs, outputs=()):
    """A plan of programs whose values are all vectors."""
    return Plan(
        tuple(GroupProgram(i, tuple(program)) for i, program in enumerate(programs)),
        (
            executable("one", [VECTOR], [VECTOR]),
            executable("two", [VECTOR], [VECTOR] * 2),
            executable("add into", [VECTOR] * 2, [VECTOR], (0,)),
        ),
        tuple(InputLeaf(name, name, VECTOR, (group,), (), False) for name, group in inputs),
        (),
        tuple(OutputLeaf(name, name, VECTOR, (group,), ()) for name, group in outputs),
    )


def two_stages():
    """Two groups; the second sends the first what it updates after the loop, too."""
    return plan_of(
        [
            [
                run_of("fwd_0__0", "one", ("v",), ("h",)),
                Send(("h",), 1, 0),
                Recv(("g",), 1, 0),
                run_of("bwd_0__0", "add into", ("g", "h"), ("out",)),
                Free(("h",)),
                Recv(("w2",), 1, 1),
            ],
            [
                Recv(("h",), 0, 0),
                run_of("FusedTask(fwd_1__0, bwd_1__0)", "two", ("h",), ("g", "d")),
                Free(("h",)),
                Send(("g",), 0, 0),
                Free(("g",)),
                run_of("after_0", "add into", ("d", "w"), ("w2",)),
                Send(("w2",), 0, 1),
            ],
        ],
        inputs=[("v", 0), ("w", 1)],
        outputs=[("out", 0), ("w2", 0), ("w2", 1)],
    )


@pytest.mark.parametrize(("processes", "nbytes"), [((1, 1), 16), ((1, 2), 32), ((2, 2), 32), ((2, 1), 16)])
def test_a_message_has_the_bytes_that_travel_between_processes(processes, nbytes):
    """To each process of a group that has the value replicated, all of it."""
    topology = Topology(tuple(GroupShape({"x": 2}, count) for count in processes))
    simulated = simulate(two_stages(), Costs(link=Link(0.25, 64)), topology=topology)
    second = next(event for event in simulated.events if event.mpmd_idx == 1)
    assert second.start == 1 + 0.25 + nbytes / 64


def test_a_plan_runs_its_cells_and_the_work_outside_the_loop():
    costs = Costs(outside={(1, OutsideTask("after", 0)): 0.5}, link=Link(0.25, 64))
    simulated = simulate(two_stages(), costs)
    assert simulated.events == (
        Event(0, parse_task("fwd_0__0"), 0, 1),
        Event(0, parse_task("bwd_0__0"), 5, 7),
        Event(1, parse_task("FusedTask(fwd_1__0, bwd_1__0)"), 1.5, 4.5),
        Event(1, parse_task("after_0"), 4.5, 5),
    )
    assert simulated.gaps == (
        Gap(0, 1, 4.5, "waits for FusedTask(fwd_1__0, bwd_1__0) of group 1"),
        Gap(0, 4.5, 5, "waits for the transfer of FusedTask(fwd_1__0, bwd_1__0) from group 1"),
        Gap(1, 0, 1, "waits for its first input, fwd_0__0 of group 0"),
        Gap(1, 1, 1.5, "waits for its first input, the transfer of fwd_0__0 from group 0"),
        Gap(1, 5, 7, "nothing left to do"),
    )
    assert (simulated.makespan, simulated.busy) == (7, (3, 3.5))


def test_the_memory_of_a_plan_is_that_which_was_verified():
    simulated = simulate(two_stages(), Costs(link=LATENCY))
    assert simulated.memory == (
        ((0, 16), (0, 32), (4.25, 48), (4.25, 64), (6.5, 48)),
        ((0, 16), (1, 32), (1.25, 64), (4.25, 48), (4.25, 32)),
    )
    verified = verify(two_stages())
    assert simulated.peaks == tuple(group.peak_bytes for group in verified.memory) == (64, 64)
    assert verified.live_bytes == (48, 64)


def test_the_end_of_a_step_waits_for_its_results():
    costs = Costs(outside={(1, OutsideTask("after", 0)): 8})
    simulated = simulate(two_stages(), costs, steps=2)
    assert simulated.gaps[1] == Gap(0, 6, 12, "waits for after_0 of group 1")
    assert [event.start for event in simulated.events if event.mpmd_idx == 0] == [0, 4, 12, 16]
    assert (simulated.makespan, simulated.period) == (24, 12)
    assert simulated.memory[0][:2] == ((0, 16), (0, 32))
    assert (12, 16) in simulated.memory[0]


def test_a_plan_may_send_what_no_task_made():
    plan = plan_of(
        [
            [Send(("v",), 1, 0)],
            [Recv(("v",), 0, 0), Send(("v",), 2, 0)],
            [Recv(("v",), 1, 0), run_of("fwd_0__0", "one", ("v",), ("out",))],
        ],
        inputs=[("v", 0)],
        outputs=[("out", 2)],
    )
    simulated = simulate(plan, Costs(link=Link(latency=1)))
    assert simulated.events == (Event(2, parse_task("fwd_0__0"), 2, 3),)
    assert simulated.gaps[1:3] == (
        Gap(1, 0, 1, "waits for its first input, the transfer of the arguments from group 0"),
        Gap(1, 1, 3, "nothing left to do"),
    )
    assert simulated.gaps[3].reason == "waits for its first input, v of group 1"


def test_a_plan_with_blocking_sends_frees_what_it_sent_later():
    costs = Costs(link=LATENCY, blocking=True)
    simulated = simulate(two_stages(), costs)
    assert (4.5, 32) in simulated.memory[1]
    assert simulated.peaks == tuple(group.peak_bytes for group in verify(two_stages()).memory)
    assert Gap(1, 4.25, 4.5, "sends FusedTask(fwd_1__0, bwd_1__0) to group 0") in simulated.gaps


def test_a_plan_that_gets_stuck_is_an_error_that_says_where():
    circle = plan_of(
        [
            [Recv(("a",), 1, 0), run_of("fwd_0__0", "one", ("a",), ("b",)), Send(("b",), 1, 0)],
            [Recv(("b",), 0, 0), run_of("fwd_1__0", "one", ("b",), ("a",)), Send(("a",), 0, 0)],
        ],
        inputs=[],
    )
    said = r"group 0, instruction 0 \(a = recv <- 1 #0\); group 1, instruction 0 \(b = recv <- 0 #0\)"
    with pytest.raises(ValueError, match=said):
        simulate(circle)
    unsent = plan_of([[], [Recv(("v",), 0, 0), run_of("fwd_0__0", "one", ("v",), ("h",))]], inputs=[("v", 0)])
    with pytest.raises(ValueError, match="edge 0 -> 1, message 0: nothing, but v = recv <- 0 #0"):
        simulate(unsent)
    to_nobody = plan_of([[Send(("v",), 2, 0)], []], inputs=[("v", 0)])
    with pytest.raises(ValueError, match="edge 0 -> 2, message 0: send v -> 2 #0, but nothing"):
        simulate(to_nobody)
