"""A correct plan passes; what mutations of a plan do not break is broken here, and found."""

import dataclasses
import time

import pytest

from mpmd.errors import PlanError
from mpmd.ir.plan import (
    Aval,
    ConstantLeaf,
    Free,
    GroupProgram,
    HostCall,
    InputLeaf,
    OutputLeaf,
    Plan,
    Recv,
    Send,
    Task,
)
from mpmd.schedules import Std1F1B
from mpmd.verify import verify
from tests.support.plans import executable, pipeline_plan, run_of

VECTOR = Aval((4,), "float32", 4)
SCALAR = Aval((), "int32", 4)


def plan_of(*programs, executables, outputs=(("out", 0),), donated=False):
    return Plan(
        tuple(GroupProgram(i, tuple(program)) for i, program in enumerate(programs)),
        tuple(executables),
        (
            InputLeaf("w", "w", VECTOR, (0,), (), donated),
            InputLeaf("x", "x", VECTOR, (1,), (), False),
            InputLeaf("never read", None, VECTOR, (), (), True),
        ),
        (ConstantLeaf("i", SCALAR, (1,)),),
        tuple(OutputLeaf(name, name, VECTOR, (group,), ()) for name, group in outputs),
    )


def ping_pong(**options):
    """Group 0 sends ``h`` to 1, which sends ``g`` back; the last run takes over its buffer."""
    return plan_of(
        [
            run_of("fwd_0__0", "forward", ("w",), ("h",)),
            Send(("h",), 1, 0),
            Recv(("g",), 1, 0),
            run_of("bwd_0__0", "update", ("h", "g"), ("out",)),
            Free(("h",)),
        ],
        [
            Recv(("h",), 0, 0),
            run_of("fwd_1__0", "combine", ("x", "h", "i"), ("g",)),
            Free(("h",)),
            Send(("g",), 0, 0),
            Free(("g",)),
        ],
        executables=[
            executable("forward", [VECTOR], [VECTOR]),
            executable("update", [VECTOR, VECTOR], [VECTOR], (1,)),
            executable("combine", [VECTOR, VECTOR, SCALAR], [VECTOR]),
        ],
        **options,
    )


def with_program(plan, group, change):
    instructions = list(plan.programs[group].instructions)
    change(instructions)
    programs = list(plan.programs)
    programs[group] = GroupProgram(group, tuple(instructions))
    return dataclasses.replace(plan, programs=tuple(programs))


def faults_of(plan):
    with pytest.raises(PlanError) as caught:
        verify(plan)
    first, *faults = str(caught.value).split("\n  ")
    assert first == "the plan cannot run:"
    return faults


def test_a_correct_plan_passes_and_is_measured():
    verified = verify(ping_pong())
    assert verified.live_bytes == (3 * 16, 3 * 16 + 4)
    assert verified.capacities == {(0, 1): 1, (1, 0): 1}


def put(instruction, at):
    return lambda program: program.__setitem__(at, instruction)


PROGRAMS = {
    "free too little": (0, lambda i: i.pop(4), "group 0 holds h to the end, where nothing needs it"),
    "free the result": (0, lambda i: i.append(Free(("out",))), "lacks the result out (out), which was freed"),
    "use after donation": (0, lambda i: i.append(Free(("g",))), "uses g, which was donated in instruction 3"),
    "donate what is read twice": (
        0,
        put(run_of("after_0", "update", ("g", "g"), ("out",)), 3),
        "donates g and reads it as another input too",
    ),
    "donate what the caller keeps": (
        0,
        put(run_of("after_0", "update", ("h", "w"), ("out",)), 3),
        "w is donated, but the caller keeps it",
    ),
    "donate what was sent": (
        0,
        put(run_of("after_0", "update", ("g", "h"), ("out",)), 3),
        "donates h, which instruction 1 sends and the message may still need",
    ),
    "call back with freed values": (
        1,
        lambda i: i.insert(3, HostCall(("x", "h"), 0, Task("fwd", 1, 0))),
        "instruction 3 (call callback 0 of fwd_1__0 with x, h) uses h, which was freed in instruction 2",
    ),
    "receive before the send": (0, lambda i: i.insert(1, i.pop(2)), "wait for one another"),
    "drop a send": (0, lambda i: i.pop(1), "edge 0 -> 1, message 0: nothing, but h = recv <- 0 #0"),
    "another tag": (0, put(Send(("h",), 1, 3), 1), "message 0: send h -> 1 #3, but h = recv <- 0 #0"),
    "send to itself": (0, put(Send(("h",), 0, 0), 1), "has no other group at its other end"),
    "run twice": (0, lambda i: i.insert(1, i[0]), "instruction 1 (fwd_0__0) defines h again"),
    "unknown executable": (
        0,
        put(run_of("after_0", "none", ("w",), ("h",)), 0),
        "runs none, which does not exist",
    ),
    "too few inputs": (
        1,
        put(run_of("after_0", "combine", ("x", "h"), ("g",)), 1),
        "does not have the numbers of inputs and outputs of combine",
    ),
    "swap inputs": (
        1,
        put(run_of("after_0", "combine", ("x", "i", "h"), ("g",)), 1),
        "reads i as float32[4], but it is int32[]",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_broken_program_is_found(name):
    group, change, said = PROGRAMS[name]
    assert said in "\n".join(faults_of(with_program(ping_pong(), group, change)))


PLANS = {
    "2 executables are called forward": ("executables", 1, {"name": "forward"}),
    "2 inputs or constants are called w": ("inputs", 1, {"name": "w"}),
    "update donates (2,) of 2 inputs": ("executables", 1, {"donated": (2,)}),
    "update donates more inputs of float32[4] than it has outputs to take them over": (
        "executables",
        1,
        {"donated": (0, 1)},
    ),
    "update does not have a spec for each of its inputs and outputs": ("executables", 1, {"in_specs": ((),)}),
    "the program at 0 is that of group 1": ("programs", 0, {"mpmd_idx": 1}),
    "the result out is to be int32[], but out is float32[4]": ("outputs", 0, {"aval": SCALAR}),
    "group 1 lacks the result out (out), which is not defined before": ("outputs", 0, {"mpmd_idxs": (1,)}),
    "no group has the result out": ("outputs", 0, {"mpmd_idxs": ()}),
    "out is on groups (0, 2), of which not all exist": ("outputs", 0, {"mpmd_idxs": (0, 2)}),
}
"""Changes of one record of a plan, by what is said of them."""


@pytest.mark.parametrize("said", PLANS)
def test_a_plan_whose_parts_do_not_fit_is_found(said):
    field, at, changes = PLANS[said]
    plan = ping_pong()
    records = list(getattr(plan, field))
    records[at] = dataclasses.replace(records[at], **changes)
    assert said in faults_of(dataclasses.replace(plan, **{field: tuple(records)}))


def test_all_faults_are_named_at_once():
    plan = with_program(ping_pong(), 0, lambda i: i.pop(0))
    plan = with_program(plan, 1, lambda i: i.append(Free(("x",))))
    assert faults_of(plan) == [
        "group 0, instruction 0 (send h -> 1 #0) uses h, which is not defined before",
        "group 0, instruction 2 (bwd_0__0) uses h, which is not defined before",
        "group 0, instruction 3 (free h) uses h, which is not defined before",
        "group 1, instruction 1 (fwd_1__0) uses h, which is not defined before",
        "group 1, instruction 2 (free h) uses h, which is not defined before",
        "group 1, instruction 5 (free x) x is freed, but the caller keeps it",
    ]


def test_groups_that_compute_the_same_value_agree_on_its_shape():
    run = run_of("before_0", "a", (), ("v",))
    makers = executable("a", [], [VECTOR]), executable("b", [], [SCALAR])
    plan = plan_of([run], [run], executables=makers, outputs=[("v", 0), ("v", 1)])
    verify(plan)
    plan = with_program(plan, 1, lambda i: put(run_of("before_0", "b", (), ("v",)), 0)(i))
    assert faults_of(plan) == ["group 1, before_0: makes v as int32[], which elsewhere is float32[4]"]


def test_a_message_of_which_nothing_is_read_would_stay_in_its_channel():
    program = [run_of("after_1", "forward", ("w",), ("h",)), Send(("h",), 1, 0), Free(("h",))]
    plan = plan_of(
        program,
        [Recv(("h",), 0, 0), Free(("h",))],
        executables=[executable("forward", [VECTOR], [VECTOR])],
        outputs=[],
    )
    assert faults_of(plan) == ["edge 0 -> 1, message 0: nothing of it is read"]
    verify(with_program(dataclasses.replace(plan, outputs=(OutputLeaf("h", "h", VECTOR, (1,), ()),)), 1, pop))


def pop(program):
    program.pop()


@pytest.mark.slow
def test_a_large_plan_is_verified_quickly():
    plan = pipeline_plan(Std1F1B(32), 128)
    start = time.process_time()
    verify(plan)
    # Far more than it takes, so that a busy machine does not matter; less than a quadratic check would.
    assert time.process_time() - start < 8


def test_a_copy_of_an_argument_that_was_sent_is_freed_like_any_value():
    plan = plan_of(
        [Send(("w",), 1, 0)],
        [Recv(("w",), 0, 0), run_of("after_0", "combine", ("x", "w"), ("out",)), Free(("w",))],
        executables=[executable("combine", [VECTOR, VECTOR], [VECTOR])],
        outputs=[("out", 1)],
    )
    verify(plan)
    assert faults_of(with_program(plan, 1, pop)) == ["group 1 holds w to the end, where nothing needs it"]
