"""A correct plan passes; each way to break it is found."""

import dataclasses

import pytest

from mpmd.errors import PlanError
from mpmd.ir import Aval, Executable, Free, GroupProgram, InputLeaf, OutputLeaf, Plan, Recv, Run, Send
from mpmd.liveness import add_frees_and_donations
from mpmd.verify import verify

VECTOR = Aval((4,), "float32", 4)


def executable(name, inputs, outputs, donated=()):
    specs = ((),) * inputs, ((),) * outputs
    return Executable(name, (VECTOR,) * inputs, (VECTOR,) * outputs, donated, *specs)


def plan_of(*programs, executables, outputs=(("out", 0),), donated=False):
    return Plan(
        tuple(GroupProgram(i, tuple(program)) for i, program in enumerate(programs)),
        tuple(executables),
        (
            InputLeaf("w", "w", VECTOR, (0,), (), donated),
            InputLeaf("x", "x", VECTOR, (1,), (), False),
        ),
        (),
        tuple(OutputLeaf(name, name, VECTOR, (group,), ()) for name, group in outputs),
    )


def ping_pong():
    """Group 0 sends to 1, which sends back; the last run updates ``w``."""
    return plan_of(
        [
            Run("fwd_0__0", "forward", ("w",), ("h",)),
            Send(("h",), 1, 0),
            Recv(("g",), 1, 0),
            Run("bwd_0__0", "update", ("h", "g"), ("out",)),
            Free(("g",)),
        ],
        [
            Recv(("h",), 0, 0),
            Run("fwd_1__0", "combine", ("x", "h"), ("g",)),
            Free(("h",)),
            Send(("g",), 0, 0),
            Free(("g",)),
        ],
        executables=[
            executable("forward", 1, 1),
            executable("update", 2, 1, (0,)),
            executable("combine", 2, 1),
        ],
    )


def with_program(plan, group, change):
    instructions = list(plan.programs[group].instructions)
    change(instructions)
    programs = list(plan.programs)
    programs[group] = GroupProgram(group, tuple(instructions))
    return dataclasses.replace(plan, programs=tuple(programs))


def test_a_correct_plan_passes_and_is_measured():
    verified = verify(ping_pong())
    assert verified.peak_bytes == (3 * 16, 3 * 16)
    assert verified.sent_bytes == {(0, 1): 16, (1, 0): 16}
    assert verified.capacities == {(0, 1): 1, (1, 0): 1}


MUTATIONS = {
    "drop a run": (0, lambda i: i.pop(0), "uses h, which is never defined"),
    "drop a send": (0, lambda i: i.pop(1), "message 0: sends nothing"),
    "drop a receive": (0, lambda i: i.pop(2), "uses g, which is never defined"),
    "run twice": (0, lambda i: i.insert(0, i[0]), "defines h again"),
    "use after free": (1, lambda i: i.insert(1, Free(("h",))), "uses h, which was freed in instruction 1"),
    "free twice": (0, lambda i: i.append(i[-1]), "uses g, which was freed"),
    "use after donation": (0, lambda i: i.append(Free(("h",))), "uses h, which was donated"),
    "retarget a send": (0, lambda i: i.__setitem__(1, Send(("h",), 0, 0)), "leads to no other group"),
    "send to nobody": (0, lambda i: i.__setitem__(1, Send(("h",), 7, 0)), "edge 0 -> 7"),
    "send another value": (0, lambda i: i.__setitem__(1, Send(("w",), 1, 0)), "message 0: sends (0, ('w',))"),
    "another tag": (0, lambda i: i.__setitem__(1, Send(("h",), 1, 3)), "message 0: sends (3, ('h',))"),
    "free the result": (0, lambda i: i.append(Free(("out",))), "lacks the result out"),
    "unknown executable": (0, lambda i: i.__setitem__(0, Run("r", "none", ("w",), ("h",))), "does not exist"),
    "too few inputs": (
        1,
        lambda i: i.__setitem__(1, Run("r", "combine", ("x",), ("g",))),
        "numbers of inputs",
    ),
    "donate what is read twice": (
        0,
        lambda i: i.__setitem__(3, Run("r", "update", ("h", "h"), ("out",))),
        "reads it as another input",
    ),
    "donate what the caller keeps": (
        0,
        lambda i: i.__setitem__(3, Run("r", "update", ("w", "g"), ("out",))),
        "donates w, which the caller keeps",
    ),
    "receive before the send": (0, lambda i: i.insert(1, i.pop(2)), "wait for one another"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_found(name):
    group, change, said = MUTATIONS[name]
    with pytest.raises(PlanError) as caught:
        verify(with_program(ping_pong(), group, change))
    assert said in str(caught.value)


def test_capacity_counts_messages_under_way():
    sends = [Run("r", "forward", ("w",), (f"h{i}",)) for i in range(3)]
    messages = [Send((f"h{i}",), 1, i) for i in range(3)]
    receives = [Recv((f"h{i}",), 0, i) for i in range(3)]
    chain = ["x", "y0", "y1", "y2"]
    runs = [Run("r", "combine", (chain[i], f"h{i}"), (chain[i + 1],)) for i in range(3)]
    plan = plan_of(
        [x for pair in zip(sends, messages, strict=True) for x in pair],
        [x for pair in zip(receives, runs, strict=True) for x in pair],
        executables=[executable("forward", 1, 1), executable("combine", 2, 1)],
        outputs=[("y2", 1)],
    )
    assert verify(plan).capacities == {(0, 1): 3}


def test_frees_follow_the_last_use_and_dead_inputs_are_donated():
    plan = plan_of(
        [
            Run("a", "forward", ("w",), ("h",)),
            Run("b", "forward", ("h",), ("k",)),
            Run("c", "combine", ("h", "k"), ("out",)),
        ],
        [],
        executables=[executable("forward", 1, 1), executable("combine", 2, 1)],
    )
    live = add_frees_and_donations(plan)
    assert [e.donated for e in live.executables] == [(), (0,)]
    assert live.programs[0].instructions[-1] == Free(("k",))
    verify(live)


def test_sent_values_are_not_donated():
    plan = plan_of(
        [
            Run("a", "forward", ("w",), ("h",)),
            Send(("h",), 1, 0),
            Run("b", "other", ("h",), ("out",)),
        ],
        [Recv(("h",), 0, 0)],
        executables=[executable("forward", 1, 1), executable("other", 1, 1)],
    )
    live = add_frees_and_donations(plan)
    assert all(e.donated == () for e in live.executables)
    assert Free(("h",)) in live.programs[0].instructions


def test_donated_arguments_are_taken_over():
    plan = plan_of(
        [Run("a", "forward", ("w",), ("out",))], [], executables=[executable("forward", 1, 1)], donated=True
    )
    assert add_frees_and_donations(plan).executables[0].donated == (0,)
