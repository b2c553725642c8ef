"""What each device of a group needs: values under their specs, temporaries, and messages."""

import dataclasses

import pytest

from mpmd.ir.executable_memory import ExecutableMemory
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
from mpmd.memory import EarliestArrival, Holding, MemoryParts, group_memories
from mpmd.schedules import GPipe
from mpmd.verify import verify
from tests.support.plans import ACTIVATION, executable, pipeline_plan, run_of

VECTOR = Aval((4,), "float32", 4)
SIZE = VECTOR.nbytes
MICROBATCHES = 3


UNARY = executable("f", [VECTOR], [VECTOR])


def plan_of(*programs, results, executables=(UNARY,)):
    """A plan of programs that have the argument ``x`` on group 0, and the results on the last group."""
    last = len(programs) - 1
    return Plan(
        tuple(GroupProgram(i, tuple(program)) for i, program in enumerate(programs)),
        executables,
        (InputLeaf("x", "x", VECTOR, (0,), (), False),),
        (),
        tuple(OutputLeaf(name, name, VECTOR, (last,), ()) for name in results),
    )


def forwards():
    """One group sends what it makes of three microbatches; another one makes the results of that."""
    first, second = [], []
    for i in range(MICROBATCHES):
        first += [run_of(f"fwd_0__{i}", "f", ("x",), (f"h{i}",)), Send((f"h{i}",), 1, i), Free((f"h{i}",))]
        second += [
            Recv((f"h{i}",), 0, i),
            run_of(f"fwd_1__{i}", "f", (f"h{i}",), (f"y{i}",)),
            Free((f"h{i}",)),
        ]
    return plan_of(first, second, results=[f"y{i}" for i in range(MICROBATCHES)])


def compiled(plan, temporaries):
    memory = ExecutableMemory(inputs=SIZE, outputs=SIZE, aliased=0, temporaries=temporaries, code=0)
    executables = tuple(dataclasses.replace(e, memory=memory) for e in plan.executables)
    return dataclasses.replace(plan, executables=executables)


def test_temporaries_are_unknown_before_the_groups_have_compiled():
    plan = forwards()
    for group in verify(plan).memory:
        assert group.peak.temporaries is None
    without = [group.peak_bytes for group in verify(plan).memory]
    after = verify(compiled(plan, 100)).memory
    assert [group.peak.temporaries for group in after] == [100, 100]
    assert [group.peak_bytes for group in after] == [nbytes + 100 for nbytes in without]
    assert after[0].task == parse_task("fwd_0__0")


def test_messages_count_from_when_they_can_be_there():
    """Nothing keeps the first group from being three messages and a step ahead."""
    verified = verify(forwards())
    assert verified.arrivals[(0, 1), 2] == EarliestArrival(0, 0)
    first, second = verified.memory
    assert first.peak == MemoryParts(arguments=SIZE, activations=SIZE)
    # While the first task runs, two messages of its step and three of the next one wait.
    assert second.peak_bytes == (1 + 1 + 2 + 3) * SIZE
    assert second.live_bytes == (MICROBATCHES + 1) * SIZE


def test_messages_that_wait_for_their_reader_are_never_ahead():
    """A gradient that comes back keeps the first group from sending the next microbatch."""
    plan = pipeline_plan(GPipe(2), 1)
    arrival = verify(plan).arrivals[(1, 0), 0]
    assert arrival.before is None
    sent = plan.programs[0].instructions[: arrival.position]
    assert any(isinstance(instruction, Send) for instruction in sent)


@pytest.mark.parametrize(
    ("holding", "sender", "receiver"),
    [
        (Holding.RECEIVER, 0, 5),
        (Holding.COPIED, 1, 5),
        (Holding.KEPT, 0, 5),
        (Holding.SLOTS, 6, 5),
        (Holding.ELSEWHERE, 0, 0),
    ],
)
def test_every_transport_holds_messages_in_its_own_way(holding, sender, receiver):
    """In messages, beside the one that the receiver uses; slots are kept by both processes."""
    plan = forwards()
    memories = group_memories(plan, verify(plan).arrivals, {(0, 1): holding})
    assert [group.peak.messages for group in memories] == [sender * SIZE, receiver * SIZE]


def test_a_message_of_two_values_is_in_use_until_both_are_dropped():
    first = [run_of("fwd_0__0", "f", ("x",), (name,)) for name in "ab"]
    second = [run_of("fwd_1__0", "f", (name,), (f"of {name}",)) for name in "ab"]
    plan = plan_of(
        (*first, Send(("a", "b"), 1, 0), Free(("a", "b"))),
        (Recv(("a", "b"), 0, 0), second[0], Free(("a",)), second[1], Free(("b",))),
        results=["of a", "of b"],
    )
    memory = group_memories(plan, verify(plan).arrivals, {(0, 1): Holding.KEPT})[1]
    # At the end: both results, and room for the two values of this step and for those of the next one.
    assert (memory.peak_bytes, memory.task) == ((2 + 2 + 2) * SIZE, None)


def test_a_buffer_is_in_use_while_a_task_takes_its_message_over():
    takes_over = dataclasses.replace(UNARY, name="g", donated=(0,))
    plan = plan_of(
        (run_of("fwd_0__0", "f", ("x",), ("h",)), Send(("h",), 1, 0), Free(("h",))),
        (Recv(("h",), 0, 0), run_of("fwd_1__0", "g", ("h",), ("y",))),
        results=["y"],
        executables=(UNARY, takes_over),
    )
    plan = compiled(plan, temporaries=1000)  # so that the task needs most
    kept, elsewhere = (
        group_memories(plan, verify(plan).arrivals, {(0, 1): holding})[1].peak_bytes
        for holding in (Holding.KEPT, Holding.ELSEWHERE)
    )
    assert kept - elsewhere == SIZE  # for the message of the next step


def test_values_are_told_apart_by_what_they_are_for():
    plan = pipeline_plan(GPipe(2), MICROBATCHES)
    weights = [leaf for leaf in plan.inputs_of(1).values() if leaf.donated]
    memory = group_memories(plan, verify(plan).arrivals, updated=[leaf.name for leaf in weights])[1]
    weight, activation = weights[0].aval.nbytes, ACTIVATION.nbytes
    peak = MemoryParts(
        parameters=weight,
        accumulators=weight,
        activations=MICROBATCHES * activation,
        received=MICROBATCHES * activation,
    )
    assert memory.peak == peak
    assert memory.peak_bytes == sum(value or 0 for value in dataclasses.astuple(memory.peak))


def test_work_outside_the_loop_has_its_own_part():
    (memory,) = verify(plan_of([run_of("after_0", "f", ("x",), ("y",))], results=["y"])).memory
    assert memory.task == OutsideTask("after", 0)
    assert memory.peak == MemoryParts(arguments=SIZE, outside=SIZE)
