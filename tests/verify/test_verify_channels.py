"""What verify says of channels is what trying every timing finds."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpmd.compiler.lower.liveness import add_frees_and_donations
from mpmd.ir.plan import Aval, GroupProgram, InputLeaf, OutputLeaf, Plan, Recv, Run, Send
from mpmd.verify import verify
from mpmd.verify.channels import channels_of, rendezvous_order
from tests.support.plans import executable, run_of

SCALAR = Aval((), "float32", 4)


@st.composite
def plans(draw) -> Plan:
    """Programs of two or three groups, projected from one order of runs and messages, which are all read."""
    groups = range(draw(st.integers(2, 3)))
    programs: list[list] = [[] for _ in groups]
    held = [[f"x{group}"] for group in groups]
    received: list[list[str]] = [[] for _ in groups]
    tags: collections.Counter = collections.Counter()

    def run(group, inputs):
        name = f"v{group}.{len(programs[group])}"
        programs[group].append(run_of("after_0", f"f{len(inputs)}", tuple(inputs), (name,)))
        held[group].append(name)
        received[group] = [value for value in received[group] if value not in inputs]

    for group in groups:
        run(group, held[group].copy())
        held[group].pop(0)
    for _ in range(draw(st.integers(0, 12))):
        group, peer = draw(st.permutations(groups))[:2]
        new = [name for name in held[group] if name not in held[peer]][-2:]
        if draw(st.booleans()) and new:
            names = tuple(draw(st.lists(st.sampled_from(new), min_size=1, max_size=2, unique=True)))
            programs[group].append(Send(names, peer, tags[group, peer]))
            programs[peer].append(Recv(names, group, tags[group, peer]))
            tags[group, peer] += 1
            held[peer] += names
            received[peer] += names
        else:
            waiting = received[group] if draw(st.booleans()) else []
            run(group, waiting or draw(st.lists(st.sampled_from(held[group]), max_size=2, unique=True)))
    for group in groups:
        run(group, received[group] or held[group][:1])
    arities = {len(i.inputs) for program in programs for i in program if isinstance(i, Run)}
    return add_frees_and_donations(
        Plan(
            tuple(GroupProgram(group, tuple(programs[group])) for group in groups),
            tuple(executable(f"f{n}", [SCALAR] * n, [SCALAR]) for n in arities),
            tuple(InputLeaf(f"x{group}", f"x{group}", SCALAR, (group,), (), False) for group in groups),
            (),
            tuple(OutputLeaf("out", held[group][-1], SCALAR, (group,), ()) for group in groups),
        )
    )


def events_of(plan: Plan, steps: int) -> list[list[tuple[str, tuple[int, int], int]]]:
    """For each group its sends and first reads in order: what it does, the edge, and which message it is."""
    sizes: collections.Counter = collections.Counter(
        (program.mpmd_idx, i.dst)
        for program in plan.programs
        for i in program.instructions
        if isinstance(i, Send)
    )
    events: list[list] = [[] for _ in plan.programs]
    for step in range(steps):
        for group, program in enumerate(plan.programs):
            posted: dict = {}
            for i in program.instructions:
                if isinstance(i, Recv):
                    edge = (i.src, group)
                    posted.update(dict.fromkeys(i.values, ("read", edge, step * sizes[edge] + i.tag)))
                for name in i.inputs if isinstance(i, Run) else i.values if isinstance(i, Send) else ():
                    if name in posted and posted[name] not in events[group]:
                        events[group].append(posted[name])
                if isinstance(i, Send):
                    edge = (group, i.dst)
                    events[group].append(("send", edge, step * sizes[edge] + i.tag))
    return events


def try_every_timing(events, capacities):
    """Walks through all states that can be reached, where a send waits while its channel is full.

    Returns the most messages in flight on each edge, and the states from which there is no way on.
    """
    most: collections.Counter = collections.Counter()
    stuck = []
    start = (0,) * len(events)
    seen, pending = {start}, [start]
    while pending:
        state = pending.pop()
        done = [event for ran, mine in zip(state, events, strict=True) for event in mine[:ran]]
        under_way = collections.Counter(edge for what, edge, _ in done if what == "send")
        under_way.subtract(edge for what, edge, _ in done if what == "read")
        for edge, count in under_way.items():
            most[edge] = max(most[edge], count)
        ways_on = []
        for group, ran in enumerate(state):
            if ran < len(events[group]):
                what, edge, message = events[group][ran]
                can_send = what == "send" and under_way[edge] < capacities.get(edge, 1000)
                if can_send or (what == "read" and ("send", edge, message) in done):
                    ways_on.append((*state[:group], ran + 1, *state[group + 1 :]))
        if not ways_on:
            stuck.append(state)
        pending += set(ways_on) - seen
        seen.update(ways_on)
    return dict(most), stuck


@given(plans())
def test_capacities_are_the_most_messages_that_any_timing_has_under_way(plan):
    most, _ = try_every_timing(events_of(plan, steps=1), {})
    assert verify(plan).capacities == most


@given(plans())
def test_with_these_capacities_steps_in_a_row_end_under_any_timing(plan):
    events = events_of(plan, steps=2)
    _, stuck = try_every_timing(events, verify(plan).capacities)
    assert stuck == [tuple(map(len, events))]


@pytest.mark.parametrize(("answer", "in_flight"), [("x1", 2), ("y", 1)])
def test_a_message_is_in_flight_until_its_reader_has_run(answer, in_flight):
    """The sender waits for an answer, sent before its first message is read or computed from the message."""
    sender = [
        run_of("after_0", "f", ("x0",), ("h0",)),
        Send(("h0",), 1, 0),
        Recv((answer,), 1, 0),
        run_of("after_1", "f", (answer,), ("h1",)),
        Send(("h1",), 1, 1),
    ]
    reply, reader = Send((answer,), 0, 0), run_of("after_0", "f", ("h0",), ("y",))
    receiver = [
        Recv(("h0",), 0, 0),
        *([reply, reader] if answer == "x1" else [reader, reply]),
        Recv(("h1",), 0, 1),
        run_of("after_1", "f", ("h1",), ("out",)),
    ]
    programs = (GroupProgram(0, tuple(sender)), GroupProgram(1, tuple(receiver)))
    plan = Plan(programs, (executable("f", [SCALAR], [SCALAR]),), (), (), ())
    assert channels_of(plan, rendezvous_order(plan)).capacities == {(0, 1): in_flight, (1, 0): 1}
