"""The processes of a group leave a step together, or not at all."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.process.agreement import Agreement
from cluster.process.world import WorldLostError
from cluster.tcp.credentials import make_credentials
from cluster.transports.router import Router
from mpmd.errors import StepAborted
from mpmd.runtime.activity import ActivityKind
from tests.support.pairs import both_ends
from tests.support.processes import endpoints

SECONDS = 20
CREDENTIALS = make_credentials(encryption=True)
LOST = "a process has lost its connection to another one of its group: "


def end(member):
    for connection in member._connections:
        connection.end()
        connection.close()


def connect(first, *others):
    for member in (first, *others):
        end(member)
    pairs = [both_ends(CREDENTIALS) for _ in others]
    first.connect([accepted for accepted, _ in pairs])
    for other, (_, connected) in zip(others, pairs, strict=True):
        other.connect([connected])


@pytest.fixture
def group():
    """The agreements of three processes, connected."""
    members = [Agreement(rank) for rank in range(3)]
    connect(*members)
    yield members
    for member in members:
        end(member)


def each(members, call):
    """The results or errors of a call of each of them at the same time."""

    def outcome(member):
        try:
            return call(member)
        except (StepAborted, WorldLostError) as error:
            return str(error)

    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(outcome, members, timeout=SECONDS))


@pytest.mark.parametrize("unable", range(3))
def test_all_stop_when_one_cannot_go_on(group, unable):
    def agree(member):
        member.agree(5, "it was aborted" if member is group[unable] else None)

    assert each(group, agree) == ["it was aborted"] * 3
    assert each(group, lambda member: member.agree(6)) == [None] * 3


def test_one_that_has_left_keeps_nobody_waiting_in_the_next_steps(group):
    def run(member):
        for step in range(6):
            try:
                member.agree(step)
                if member is group[step % 3]:
                    member.leave(step, f"failed at {step}")
                    continue
                member.agree(step)
                return "went on"
            except StepAborted as error:
                assert f"failed at {step}" in str(error)
        return "done"

    assert each(group, run) == ["done"] * 3


def test_a_process_that_misses_a_step_ends_the_waiting_of_the_others(group):
    def run(member):
        try:
            if member is not group[1]:
                member.agree(1)
            member.agree(2)
        finally:  # the driver ends a process that raises this
            if member is group[0]:
                end(member)

    first, second, third = each(group, run)
    assert first == third == "a process has missed a step"
    assert second.startswith(LOST)


def test_a_process_that_ends_its_connections_ends_the_waiting_of_the_others():
    """It did not get a request that the others run, because the driver has ended its connections."""
    processes = endpoints([2])
    routers = [Router(process, submesh=None) for process in processes]
    addresses = [router.listen(["tcp"], "127.0.0.1", CREDENTIALS) for router in routers]

    def connected(process):
        member = Agreement(process.rank)
        connections = routers[process.rank].connect({}, addresses, process.partners)
        member.connect(connections.values())
        return member

    with ThreadPoolExecutor(2) as threads:
        first, _ = threads.map(connected, processes, timeout=SECONDS)
        waiting = threads.submit(first.agree, 1)
        routers[1].close()
        with pytest.raises(WorldLostError, match=LOST):
            waiting.result(SECONDS)
    routers[0].close()


def test_processes_may_connect_anew(group):
    connect(*group)
    assert each(group, lambda member: member.agree(1)) == [None] * 3


def test_one_process_agrees_with_itself():
    alone = Agreement(0)
    alone.agree(1)
    with pytest.raises(StepAborted, match="why"):
        alone.agree(1, "why")
    alone.leave(1, "why")


def test_a_process_that_waits_for_the_others_says_so(group):
    activity = group[0]._activity
    activity.step = 5
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(group[0].agree, 5)
        while (doing := activity.read()).what == "idle":
            time.sleep(0.01)
        each(group[1:], lambda member: member.agree(5))
        waiting.result(SECONDS)
    assert doing.what == "agreeing with the other processes of the group"
    assert (doing.step, doing.kind) == (5, ActivityKind.OTHER)
    assert activity.read().what == "idle"
