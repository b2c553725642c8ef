"""The journal in any order of requests, answers, snapshots and deaths."""

import collections

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.recovery.journal import BEGINNING
from cluster.recovery.logged import LoggedSnapshot, LoggedStep
from mpmd.runtime.requests import CopyOut, Fetch, Read, Released, StepReply, StepRequest
from tests.support.counting_journal import CountingJournal

GROUPS = (0, 1, 2)


class Group:
    """A group: carries out requests in order, each of which depends on all steps before."""

    def __init__(self):
        self.values = {}
        self.chain = ()
        self.inbox = collections.deque()
        self.outbox = collections.deque()
        self.made = collections.deque()  # copies, which travel by another way than replies
        self.copied_out = {}
        self.copies = {BEGINNING: ({}, ())}

    def work(self):
        attempt, entry, released = self.inbox.popleft()
        for handle in released:
            self.values.pop(handle, None)
        if isinstance(entry, tuple):
            number, entry = entry
            self.copies[number] = (dict(self.values), self.chain)
            self.made.append((attempt, entry, number))
            return
        match next(iter(entry.requests.values())):
            case StepRequest():
                self.chain = (*self.chain, entry.ordinal)
                self.values[entry.ordinal] = hash(self.chain)
                result = StepReply({entry.ordinal: np.array(hash(self.chain))})
            case Read(stored):
                ((handle, value),) = stored.items()
                self.chain = (*self.chain, handle)
                self.values[handle] = value
                result = StepReply({})
            case Fetch(handle):
                result = self.values[handle]
            case CopyOut(copy, handles):
                self.copied_out[copy] = [self.values[handle] for handle in handles]
                result = None
        self.outbox.append((attempt, entry, result))


ALL = 10**6
COUNTS = st.just((ALL,) * 3) | st.tuples(*[st.sampled_from([0, 1, ALL])] * 3)


class Deaths(RuleBasedStateMachine):
    """Steps, reads, fetches, snapshots and deaths in any order. The user sees what no death has touched."""

    def __init__(self):
        super().__init__()
        self.journal = CountingJournal()
        self.groups = [Group() for _ in GROUPS]
        self.chain = ()  # what the user has asked for
        self.given = {}
        self.asked = []
        self.alive = {}  # the values that the user has not freed, as they have to be
        self.to_free = []
        self.num_reads = 0
        self.copies = {}  # what is to be written, as it has to be
        self.copied = collections.defaultdict(set)
        self.suspended = False

    def send(self, entry):
        attempt = self.journal.attempt
        for i in GROUPS:
            inbox = self.groups[i].inbox
            if isinstance(entry, LoggedSnapshot):
                inbox.append((attempt, (entry.number, entry), entry.released[i].handles))
            elif i in entry.groups:
                inbox.append((attempt, entry, entry.released.get(i, Released()).handles))

    def tell(self, outcomes):
        for request, mpmd_idx, result, error in outcomes:
            assert error is None
            assert (request, mpmd_idx) not in self.given, "the user is told once"
            self.given[request, mpmd_idx] = result
        together = collections.Counter(outcome.request for outcome in outcomes)
        for request, count in together.items():
            assert count == len(GROUPS) or not request.is_of_one_attempt

    def freed(self):
        freed, self.to_free = self.to_free, []
        return Released(tuple(freed))

    @precondition(lambda self: not self.suspended)
    @rule(recorded=st.booleans())
    def step(self, recorded):
        request = StepRequest(0, 0, (), (), released=self.freed(), profile=recorded)
        step = self.journal.add_step(dict.fromkeys(GROUPS, request))
        self.chain = (*self.chain, step.ordinal)
        self.alive[step.ordinal] = hash(self.chain)
        self.asked += [(step, i, hash(self.chain)) for i in GROUPS]
        self.send(step)

    @precondition(lambda self: not self.suspended)
    @rule()
    def read(self):
        """The same value on all groups. Its handle is negative, as those of steps are not."""
        handle = -1 - self.num_reads
        self.num_reads += 1
        self.chain = (*self.chain, handle)
        self.alive[handle] = 1000 * self.num_reads
        for i in GROUPS:
            read = self.journal.add_read(i, {handle: self.alive[handle]})
            self.asked.append((read, i, StepReply({})))
            self.send(read)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), mpmd_idx=st.sampled_from(GROUPS))
    def fetch(self, data, mpmd_idx):
        """Also while groups are being replaced."""
        handle = data.draw(st.sampled_from(sorted(self.alive)))
        fetch = self.journal.add_fetch(mpmd_idx, handle)
        self.asked.append((fetch, mpmd_idx, self.alive[handle]))
        if not self.suspended:
            self.send(fetch)

    @precondition(lambda self: self.alive and not self.suspended)
    @rule(data=st.data(), mpmd_idx=st.sampled_from(GROUPS))
    def copy_out(self, data, mpmd_idx):
        handle = data.draw(st.sampled_from(sorted(self.alive)))
        copy = len(self.asked)
        self.copies[copy] = mpmd_idx, self.alive[handle]
        entry = self.journal.add_copy(mpmd_idx, copy, [handle])
        self.asked.append((entry, mpmd_idx, None))
        self.send(entry)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def write(self, data):
        """Also while groups are being replaced: what was given up."""
        copy = data.draw(st.sampled_from(sorted(self.copies)))
        del self.copies[copy]
        self.journal.drop_copies([copy])

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def free(self, data):
        handle = data.draw(st.sampled_from(sorted(self.alive)))
        del self.alive[handle]
        self.to_free.append(handle)

    @precondition(lambda self: not (self.suspended or self.journal.snapshot or self.journal.unasked))
    @rule()
    def snapshot(self):
        released = self.freed()
        self.send(self.journal.begin_snapshot(dict.fromkeys(GROUPS, released)))

    @precondition(lambda self: not self.suspended and self.journal.snapshot is not None)
    @rule()
    def fail_snapshot(self):
        self.give_back_released()
        self.journal.fail_snapshot()

    def give_back_released(self):
        if (snapshot := self.journal.snapshot) is not None:
            self.to_free += snapshot.released[0].handles

    @rule(counts=COUNTS)
    def work(self, counts):
        for group, count in zip(self.groups, counts, strict=True):
            for _ in range(min(count, len(group.inbox))):
                group.work()

    @rule(counts=COUNTS)
    def hear(self, counts):
        for i, count in zip(GROUPS, counts, strict=True):
            outbox = self.groups[i].outbox
            for _ in range(min(count, len(outbox))):
                attempt, entry, result = outbox.popleft()
                self.tell(self.journal.answer(entry, i, result, attempt=attempt))

    @rule()
    def hear_of_copies(self):
        for i in GROUPS:
            for attempt, snapshot, number in self.groups[i].made:
                self.copied[attempt, number].add(i)
                if self.copied[attempt, number] == set(GROUPS) and snapshot is self.journal.snapshot:
                    self.journal.mark_copied(attempt, snapshot)
            self.groups[i].made.clear()

    @rule()
    def settle(self):
        """All that was asked is carried out, and heard of."""
        self.work((ALL,) * 3)
        self.hear_of_copies()
        self.hear((ALL,) * 3)

    @precondition(lambda self: not self.suspended)
    @rule(mpmd_idx=st.sampled_from(GROUPS))
    def die(self, mpmd_idx):
        self.groups[mpmd_idx].values = None
        self.groups[mpmd_idx].copied_out.clear()
        self.journal.suspend()
        self.suspended = True
        for i, group in enumerate(self.groups):  # the calls that are under way fail
            for attempt, entry, _ in group.inbox:
                if not isinstance(entry, tuple):  # a snapshot
                    self.tell(self.journal.answer(entry, i, error=RuntimeError("closed"), attempt=attempt))
            group.inbox.clear()

    @precondition(lambda self: self.suspended)
    @rule()
    def recover(self):
        for group in self.groups:
            values, group.chain = group.copies[self.journal.committed]
            group.values = dict(values)
            group.inbox.clear()
        self.suspended = False
        self.give_back_released()
        for entry in self.journal.go_back():
            self.send(entry)

    @invariant()
    def what_is_given_is_as_without_deaths(self):
        for request, mpmd_idx, expected in self.asked:
            if (request, mpmd_idx) in self.given:
                result = self.given[request, mpmd_idx]
                value = result.inline[request.ordinal] if isinstance(request, LoggedStep) else result
                assert value == expected
        for group in self.groups:
            assert len(set(group.chain)) == len(group.chain), "a step has run twice"

    def teardown(self):
        """In the end everything is given, and all groups are in the same state."""
        if self.suspended:
            self.recover()
        self.settle()
        assert len(self.given) == len(self.asked)
        for group in self.groups:
            assert group.chain == self.chain
            assert {h: group.values[h] for h in self.alive} == self.alive
        for copy, (mpmd_idx, value) in self.copies.items():
            assert self.groups[mpmd_idx].copied_out[copy] == [value]
        self.journal.drop_copies()
        assert self.journal.snapshot is None


test_deaths_in_any_schedule = Deaths.TestCase
