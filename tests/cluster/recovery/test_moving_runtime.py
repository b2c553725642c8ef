"""Groups that move, with groups, processes and allocations that only pretend."""

import dataclasses
import threading
import time
from concurrent.futures import Future

import pytest

from cluster.recovery import Recovery
from cluster.recovery import moves as moves_module
from cluster.recovery.processes import SupersededError
from cluster.recovery.report import DRAINED, GROWN, SHRUNK
from mpmd.errors import GroupDiedError, RecoveryError
from tests.support.pretended_groups import SOON, Driven, Processes, await_told, commit_snapshot
from tests.support.public_functions import cluster_mesh


class MovedProcesses(Processes):
    """``kinds`` are why groups are to move, and ``fault`` what preparing for a move raises."""

    def __init__(self):
        super().__init__()
        self.num_own = 2
        self.can_share = True
        self.discarded = 0
        self.silent = set()
        self.kinds = {}
        self.prepared = []
        self.fault = None
        self.has_allocation = True

    def find_dead(self):
        return self.silent

    def check_open(self):
        if self.stop.is_set():
            raise SupersededError("the mesh was closed")

    def discard(self):
        self.discarded += 1

    def groups_to_move(self):
        return dict(self.kinds)

    def prepare_move(self, mpmd_idx, kind):
        if self.fault:
            raise self.fault
        self.prepared.append((mpmd_idx, kind))
        if self.has_allocation:
            host = 0 if self.kinds.pop(mpmd_idx) == SHRUNK else None
            self.infos[1] = dataclasses.replace(self.infos[1], shares_with=host)
        return self.has_allocation


class Elastic(Driven):
    def look_after(self):
        """Has groups moved, and waits until they have."""
        moves = self._supervisor.moves
        moves.look_after()
        with self.changed:
            assert self.changed.wait_for(lambda: self.error or not moves._is_looking, SOON)

    def reply_to_all(self):
        """Answers all steps and copies that are asked, also those that are asked next."""
        calls = self.attempts[-1]
        for index, (_, futures) in enumerate(calls.steps):
            if not all(future.done() for future in futures.values()):
                calls.reply(index)
        for _, method, _, future in calls.made:
            if method == "Snapshot" and not future.done():
                future.set_result(None)


@pytest.fixture
def elastic(monkeypatch):
    monkeypatch.setattr(moves_module, "_SAVE_SECONDS", 0.0)
    recovery = Recovery(every=100, max_failures=1)
    reports = []
    driven = Elastic(MovedProcesses(), recovery, reports.append)
    driven.reports = reports
    driven._processes.may_copy.set()
    yield driven
    driven.close()


def in_thread(function, *arguments):
    result = Future()

    def run():
        try:
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def resize(driven, num_places, kinds):
    resizing = in_thread(driven.resize, num_places, SOON)
    assert driven._supervisor.moves.looks.get(timeout=SOON) is None
    driven._processes.kinds = kinds
    driven.look_after()
    resizing.result(SOON)


def await_snapshot(driven, count):
    """Until so many processes were asked to copy their values."""
    deadline = time.monotonic() + SOON
    while len(driven.attempts[-1].named("Snapshot")) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_group_moves_at_a_snapshot_of_all_steps_while_others_wait(elastic, capsys):
    elastic.step()
    elastic.attempts[0].reply(0)
    commit_snapshot(elastic)
    futures = [elastic.step(), elastic.step()]
    elastic._processes.kinds = {1: GROWN}
    looking = in_thread(elastic.look_after)
    with elastic.changed:
        assert elastic.changed.wait_for(lambda: not elastic._ledger.is_running, SOON)
    submitting = in_thread(elastic.step)
    elastic.reply_to_all()
    await_snapshot(elastic, 4)
    assert not submitting.done()
    elastic.reply_to_all()
    looking.result(SOON)
    submitting.result(SOON)
    assert [future.result(SOON).inline[7] for two in futures for future in two.values()] == [1.0] * 4
    assert elastic._processes.restored == [2]
    assert len(elastic.attempts) == 2
    assert len(elastic.attempts[1].steps) == 1, "the new one alone"
    (report,) = elastic.reports
    assert (report.kind, report.mpmd_idxs, report.num_replayed) == (GROWN, (1,), 0)
    assert list(report.seconds)[:2] == ["prepared", "copied"]
    await_told(capsys, "cluster: moved (grown) group 1 in")


def test_moves_are_no_failures_nor_are_deaths_of_groups_that_are_to_move(elastic):
    for _ in range(3):
        elastic._processes.kinds = {0: DRAINED}
        elastic.look_after()
    elastic._processes.kinds, elastic._processes.fault = {1: DRAINED}, RuntimeError("no process started")
    elastic.look_after()
    elastic.die(1)
    elastic.step()
    elastic.die(1)
    assert elastic.error is None
    elastic.die(0)
    with pytest.raises(RecoveryError, match="the groups have failed 2 times, and max_failures is 1"):
        elastic.step()[0].result(SOON)
    assert [mpmd_idx for mpmd_idx, _ in elastic._processes.prepared] == [0, 0, 0]


def test_a_group_does_not_move_when_another_one_dies_meanwhile(elastic):
    elastic.step()
    elastic._processes.kinds = {1: GROWN}
    looking = in_thread(elastic.look_after)
    with elastic.changed:
        assert elastic.changed.wait_for(lambda: elastic._supervisor.moves.is_ready, SOON)
    elastic.die(0)
    looking.result(SOON)
    assert elastic._processes.restored == [0]
    assert elastic._processes.discarded == 1
    elastic.reply_to_all()
    deadline = time.monotonic() + SOON
    while not elastic.reports and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [report.kind for report in elastic.reports] == ["died"]
    assert elastic._supervisor.moves.under_way is None


def test_a_checkpoint_is_waited_for_unless_the_node_is_to_end(elastic, capsys):
    elastic.step()
    elastic.attempts[0].reply(0)
    commit_snapshot(elastic)
    elastic.step()
    elastic.reply_to_all()
    handle = elastic.next_handle()
    elastic.copy_out(0, handle, [1])
    writing = elastic.write(0, handle, [["spec"]])
    elastic._processes.kinds = {1: GROWN}
    elastic.look_after()
    assert (
        "group 1 does not move, though the cluster has room for it: a checkpoint is being saved"
        in capsys.readouterr().err
    )
    assert elastic.reports == [] and elastic._processes.prepared == []
    elastic.attempts[0].future("CopyOut").set_result(None)
    elastic._processes.kinds = {1: DRAINED}
    looking = in_thread(elastic.look_after)
    with elastic.changed:
        assert elastic.changed.wait_for(lambda: len(elastic.attempts) > 1 and not elastic._ledger.dead, SOON)
    calls = elastic.attempts[1]
    assert (len(calls.steps), calls.named("CopyOut")) == (1, [(0, handle, (1,))]), "both are done again"
    elastic.reply_to_all()
    calls.future("CopyOut").set_result(None)
    calls.future("Write").set_result(16)
    assert writing.result(SOON) == [16]
    elastic.free((0,), handle)
    looking.result(SOON)
    elastic._processes.kinds = {1: GROWN}
    looking = in_thread(elastic.look_after)
    await_snapshot(elastic, 2)
    elastic.reply_to_all()
    looking.result(SOON)
    assert [report.kind for report in elastic.reports] == [DRAINED, GROWN]


def test_a_copy_that_the_log_has_given_up_is_not_lost_by_a_move(elastic, capsys):
    handle = elastic.next_handle()
    elastic.copy_out(0, handle, [1])
    elastic.attempts[0].future("CopyOut").set_result(None)
    with elastic.changed:
        elastic._ledger.drop_copies()  # as a step does that the copy has kept waiting
    elastic._processes.kinds = {0: SHRUNK}
    elastic.look_after()
    assert "a checkpoint is being saved" in capsys.readouterr().err
    elastic.free((0,), handle)
    elastic.look_after()
    assert [report.kind for report in elastic.reports] == [SHRUNK]


def test_a_death_at_the_moment_of_a_move_is_a_failure(elastic, monkeypatch):
    detach = elastic._groups.detach

    def with_a_death(reason):
        elastic._processes.on_death(GroupDiedError("group 0 died", 0))
        detach(reason)

    monkeypatch.setattr(elastic._groups, "detach", with_a_death)
    elastic._processes.kinds = {1: GROWN}
    elastic.look_after()
    assert [report.mpmd_idxs for report in elastic.reports] == [(0, 1)]
    elastic.die(1)
    with pytest.raises(RecoveryError, match="the groups have failed 2 times, and max_failures is 1"):
        elastic.step()[0].result(SOON)


def test_a_group_whose_copies_may_be_gone_does_not_move(elastic, capsys):
    elastic._processes.kinds, elastic._processes.silent = {1: GROWN}, {0}
    elastic.look_after()
    why = "group 1 does not move, though the cluster has room for it: no answer from group 0"
    assert why in capsys.readouterr().err
    with pytest.raises(RuntimeError, match=rf"group 1 did not move within 0 s; {why}"):
        elastic.resize(1, 0.0)
    assert elastic._processes.discarded == 1 and elastic._supervisor.moves.under_way is None
    elastic._processes.kinds, elastic._processes.silent = {1: GROWN}, set()
    elastic.look_after()
    assert [report.kind for report in elastic.reports] == [GROWN]


def test_groups_that_are_asked_to_move_are_pinged_until_they_answer(elastic, capsys):
    elastic.step()
    elastic._processes.kinds, elastic._processes.silent = {1: GROWN}, {1}
    looking = in_thread(elastic.look_after)
    with elastic.changed:
        assert elastic.changed.wait_for(lambda: elastic._supervisor.moves.is_ready, SOON)
    assert elastic.attempts[0].named("health") == [(0,), (1,)]
    assert not elastic.attempts[0].future("health").done(), "which is why the driver pings"
    assert "no answer from group 1" in capsys.readouterr().err
    elastic.die(1)
    looking.result(SOON)
    assert elastic._processes.discarded == 1 and elastic._supervisor.moves.under_way is None


def test_that_there_is_no_other_place_is_said_once(elastic, capsys):
    elastic._processes.kinds, elastic._processes.has_allocation = {1: DRAINED}, False
    for _ in range(2):
        elastic.look_after()
    assert capsys.readouterr().err.count("its node is to end: there is no other place for it") == 1
    assert elastic.reports == []


def test_resizing_moves_groups_or_says_why_not(elastic):
    resize(elastic, 1, {1: SHRUNK})
    assert elastic._processes.allocations.num_own == 1
    assert [report.kind for report in elastic.reports] == [SHRUNK]
    with pytest.raises(RuntimeError, match=r"resize\(2\): group 1 did not move within 0 s.*by itself as"):
        elastic.resize(2, 0.0)
    resize(elastic, 2, {1: GROWN})
    elastic._processes.allocations.can_share = False
    with pytest.raises(RuntimeError, match="groups may not share devices here"):
        elastic.resize(1, SOON)
    assert [report.kind for report in elastic.reports] == [SHRUNK, GROWN]


def test_resizing_ends_when_what_groups_have_left_is_given_back(elastic, monkeypatch):
    giving_back, may_go_on = threading.Event(), threading.Event()

    def give_back():
        giving_back.set()
        assert may_go_on.wait(SOON)

    monkeypatch.setattr(elastic._processes.spares, "start_missing", give_back)
    resizing = in_thread(resize, elastic, 1, {1: SHRUNK})
    assert giving_back.wait(SOON)
    settling = in_thread(elastic.resize, 1, SOON)
    with pytest.raises(TimeoutError):
        settling.result(0.05)
    may_go_on.set()
    resizing.result(SOON)
    settling.result(SOON)


@pytest.mark.parametrize("number", [0, 5])
def test_numbers_of_places_that_cannot_be(number):
    with pytest.raises(ValueError, match=f"num_places must be a whole number from 1 to 4, not {number}"):
        cluster_mesh().resize(number)


def test_closing_ends_a_move(elastic, capsys):
    elastic.step()
    elastic.attempts[0].reply(0)
    elastic._processes.kinds = {1: GROWN}
    looking = in_thread(elastic.look_after)
    await_snapshot(elastic, 2)
    elastic.close()
    looking.result(SOON)
    elastic._processes.kinds, elastic._processes.fault = (
        {1: GROWN},
        RuntimeError("the new process was killed"),
    )
    elastic.look_after()
    assert elastic.reports == [] and capsys.readouterr().err == ""
    with pytest.raises(RuntimeError, match="closed"):
        elastic.resize(1, SOON)


def test_the_status_shows_who_shares(elastic):
    elastic._processes.infos[1] = dataclasses.replace(elastic._processes.infos[1], shares_with=0)
    elastic._processes.may_replace.clear()
    elastic._processes.kinds = {1: SHRUNK}
    looking = in_thread(elastic.look_after)
    deadline = time.monotonic() + SOON
    while not elastic.is_recovering and time.monotonic() < deadline:
        time.sleep(0.001)
    shown = str(elastic.status())
    assert "host, shared with group 0" in shown
    assert "group 1 moves: it is to share a node with others" in shown
    elastic._processes.may_replace.set()
    looking.result(SOON)
    assert dict(elastic.reports[0].shares_with) == {1: 0}
