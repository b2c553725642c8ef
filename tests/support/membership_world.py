"""Groups, threads and places that only pretend, for the state machine of membership."""

import collections
import itertools

import numpy as np

from cluster.recovery import Recovery
from cluster.recovery import actions as do
from cluster.recovery.events import (
    Answered,
    Closed,
    Copying,
    Died,
    Done,
    Faulted,
    Lost,
    Repeated,
    RewindAsked,
    Unneeded,
)
from cluster.recovery.journal import BEGINNING
from cluster.recovery.keepers import CopiesLostError
from cluster.recovery.liveness_waiter import ProcessLostError, SupersededError
from cluster.recovery.logged import LoggedSnapshot, LoggedStep
from cluster.recovery.membership import Membership
from mpmd.errors import GroupDiedError, NonFiniteError, StepAborted, StepTimeoutError, TaskError
from mpmd.runtime.digests import (
    DeviceDigest,
    DigestedEvent,
    EventKind,
    ProcessDigests,
    ProcessEvents,
    ShardDigest,
    ValueDigest,
)
from mpmd.runtime.lost_values import LostValueError
from mpmd.runtime.requests import CopyOut, Fetch, Read, Released, StepReply, StepRequest

MANY = 10**4
STATE = 10**6
"""The handle of what steps make."""


class Group:
    """A group's process, if it has one, and where it runs. It answers requests in order."""

    def __init__(self, place):
        self.place = place
        self.is_alive = self.is_open = self.is_loaded = True
        self.inbox = collections.deque()
        self.chain = ()  # the steps that have made its values

    def end(self):
        self.is_alive = False
        self.inbox.clear()


class Unlogged:
    """A request to groups of which one is left out. It is compared by identity."""

    def __init__(self, groups):
        self.groups = groups


class World:
    """Carries out actions as the ``Shell`` does, on groups that only pretend.

    The last ``num_left_out`` groups are left out of recovery.

    Attributes:
      threads: the jobs that each has still to carry out.
      unheard: the groups whose deaths the driver has not heard of.
      futures: what the user waits for; and what the user was told.
      chain: the steps that have made the values of the user.
      copies: the chain of each group, by snapshot.
      flips: the groups that compute wrong bits, each in so many of its next steps.
      unreadable: the reads that fail from now on.
      refusing: the steps that make a NaN, which is an error where it is refused.
      late: the steps that take too long when they are repeated.
      garbled: the groups that receive messages with other bits than they were sent with.
      rewound: the ends of rewinds.
      places: those that are reserved; and those of processes that were prepared, by group.
    """

    def __init__(self, policy=None, num_groups=3, num_left_out=0):
        self.logged = range(num_groups)
        num_groups += num_left_out
        self.membership = Membership(
            policy or Recovery(every=3, max_failures=3),
            [1] * num_groups,
            left_out=range(len(self.logged), num_groups),
        )
        self.journal = self.membership.journal
        self.left_out = self.membership.left_out
        self.known = dict.fromkeys(self.left_out.groups, ())  # what the user knows of their chains
        self.groups = [Group(place) for place in range(num_groups)]
        self.numbers = itertools.count(num_groups)
        self.num_steps = 0
        self.threads = []
        self.is_attached = True
        self.unheard = []
        self.resetting = set()
        self.fails = set()
        self.corrupts = False
        self.flips = collections.Counter()
        self.unreadable = set()
        self.refusing = set()
        self.late = set()
        self.garbled = set()
        self.loses_copies = False
        self.damaged = ()
        self.rewound = []
        self.corruptions = []
        self.chain = ()
        self.futures = set()
        self.told = {}
        self.copies = {BEGINNING: dict.fromkeys(self.logged, ())}
        self.places = set(range(num_groups))
        self.prepared = {}
        self.has_place = True
        self.looking = None
        self.done = []
        self.reports = []
        self.said = []
        self.given_back = []

    # Events.

    def tell(self, event):
        self.threads.append(collections.deque(self.act(event)))

    def act(self, event):
        jobs = []
        for action in self.membership.handle(event):
            if isinstance(action, do.Job):
                jobs.append(action)
            else:
                self.carry_out(action)
        return jobs

    def carry_out(self, action):
        match action:
            case do.Tell(outcomes):
                for request, mpmd_idx, result, error in outcomes:
                    self.settle((request, mpmd_idx), result if error is None else error)
            case do.Attach():
                assert not self.is_attached
                self.is_attached = True
            case do.LoseValues():
                self.chain = ()
            case do.ForgetValues(groups):
                for mpmd_idx in groups:
                    assert self.groups[mpmd_idx].chain == ()
                    self.known[mpmd_idx] = ()
            case do.Replay(entries):
                for group in self.groups:
                    assert group.is_open and group.is_loaded, "all were replaced as a whole"
                for entry in entries:
                    self.ask(entry)
            case do.MarkCommitted():
                assert self.journal.committed != BEGINNING
            case do.BeginSnapshot():
                self.begin_snapshot()
            case do.Repeat(number, entries, refused):
                for entry in entries:
                    for mpmd_idx in entry.groups:
                        if self.groups[mpmd_idx].is_alive:
                            self.groups[mpmd_idx].inbox.append((None, entry, (number, refused)))
            case do.EndRewind():
                self.rewound.append(action)
            case do.ReportCorruption(report):
                self.corruptions.append(report)
            case do.GiveBack(snapshot):
                self.given_back.append(snapshot)
            case do.Say(message):
                self.said.append(message)
            case do.End(error):
                for future in sorted(self.futures, key=str):
                    self.settle(future, error)
                self.left_out.pending.clear()

    def settle(self, future, result):
        assert future not in self.told, "the user is told once"
        self.futures.remove(future)
        self.told[future] = result

    # What the user does.

    def step(self, donated=(), fails=False):
        self.num_steps += 1
        step = self.journal.add({i: self.request(donated) for i in self.logged})
        if fails:
            self.fails.add(step)
        else:
            self.chain = (*self.chain, step.ordinal)
        self.ask_first(step)
        if self.membership.check_is_due:
            self.rewind()
        elif self.membership.snapshot_is_due:
            self.begin_snapshot()
        return step

    def request(self, donated):
        return StepRequest(0, self.num_steps, donated, (STATE,), donated=donated)

    def rewind(self, refused=None):
        number = next(self.numbers)
        self.tell(RewindAsked(number, refused))
        return number

    @property
    def may_submit(self):
        membership = self.membership
        if membership.error is not None or not membership.is_running:
            return False
        if membership.snapshot_is_late and self.journal.keeps_copies:
            self.tell(Unneeded())
        return not membership.snapshot_is_late

    def sample(self, *mpmd_idxs):
        """A request that is not logged, such as a copy from a logged group to one that is left out."""
        request = Unlogged(mpmd_idxs)
        self.futures.add(request)
        if any(self.left_out.dead.get(mpmd_idx) for mpmd_idx in mpmd_idxs):
            self.settle(request, GroupDiedError("a group is dead", mpmd_idxs[-1]))
            return request
        self.left_out.pending.add(request)
        for mpmd_idx in mpmd_idxs:
            if self.groups[mpmd_idx].is_alive:
                self.groups[mpmd_idx].inbox.append((self.journal.attempt, request, 0))
        return request

    def settle_unlogged(self, request, result):
        if request in self.left_out.pending:
            self.left_out.pending.remove(request)
            self.settle(request, result)

    def replace(self, *mpmd_idxs):
        self.left_out.wanted.update(self.left_out.dead.keys() & set(mpmd_idxs))

    def fetch(self, mpmd_idx):
        self.ask_first(self.journal.add({mpmd_idx: Fetch(0)}))

    def save(self, mpmd_idx):
        copy = next(self.numbers)
        self.membership.moves.unwritten.add(copy)
        self.ask_first(self.journal.add({mpmd_idx: CopyOut(copy, ())}))
        return copy

    def finish_saving(self, copy):
        self.membership.moves.unwritten.discard(copy)
        self.tell(Unneeded(frozenset([copy])))

    def close(self):
        self.tell(Closed(RuntimeError("the mesh was closed")))
        self.run_job(do.Release())

    # What groups are asked.

    def ask_first(self, request):
        self.futures |= {(request, mpmd_idx) for mpmd_idx in request.groups}
        self.ask(request)

    def begin_snapshot(self):
        self.ask(self.journal.begin_snapshot(dict.fromkeys(self.logged, Released())))

    def ask(self, entry):
        if self.membership.dead:
            return
        is_snapshot = isinstance(entry, LoggedSnapshot)
        for mpmd_idx in self.logged if is_snapshot else entry.groups:
            if self.groups[mpmd_idx].is_alive:
                number = entry.number if is_snapshot else 0
                self.groups[mpmd_idx].inbox.append((self.journal.attempt, entry, number))
        if is_snapshot:
            self.tell(Copying(entry, [entry.number]))

    def answer(self, mpmd_idx):
        """A group carries out the next request, and says so."""
        group = self.groups[mpmd_idx]
        attempt, entry, number = group.inbox.popleft()
        is_repeated, refused = attempt is None, attempt is None and number[1]
        result = error = None
        match entry:
            case Unlogged():
                if mpmd_idx in self.left_out.groups and entry in self.left_out.pending:
                    assert entry not in group.chain, "a request has run twice"
                    group.chain = (*group.chain, entry)
                    self.known[mpmd_idx] = group.chain
                    self.settle_unlogged(entry, group.chain)
                return
            case LoggedSnapshot():
                self.copies.setdefault(number, {})[mpmd_idx] = group.chain
                return
            case LoggedStep(failure=str() as why):
                error = LostValueError(why)
            case LoggedStep() if entry in self.fails:
                error = StepAborted("a fault") if mpmd_idx else TaskError("a fault", 0, "fwd_0__0")
            case LoggedStep() if is_repeated and entry in self.late:
                error = StepTimeoutError("step 9 has taken longer than step_timeout=5 s")
            case LoggedStep() if refused and entry in self.refusing:
                error = NonFiniteError("a nan", mpmd_idx, "fwd_0__0")
            case LoggedStep():
                assert entry.ordinal not in group.chain, "a step has run twice"
                is_wrong = self.flips[mpmd_idx] > 0
                self.flips[mpmd_idx] -= is_wrong
                group.chain = (*group.chain, entry.ordinal + is_wrong * next(self.numbers) / MANY)
                value, self.corrupts = hash(group.chain) + self.corrupts, False
                result = StepReply({entry.ordinal: np.array(value)}, events=self.events_of(mpmd_idx))
            case _ if entry.kind is Fetch:
                result = group.chain
            case _ if entry in self.unreadable:
                error = RuntimeError("no such file")
            case _ if entry.kind is Read:
                result = StepReply({})
        if is_repeated:
            self.tell(Repeated(number[0], entry, mpmd_idx, result, error))
        else:
            self.tell(Answered(attempt, entry, mpmd_idx, result, error))

    def events_of(self, mpmd_idx):
        others = (mpmd_idx - 1) % len(self.groups), (mpmd_idx + 1) % len(self.groups)
        digests = mpmd_idx in self.garbled, hash(self.groups[mpmd_idx].chain)
        events = tuple(
            DigestedEvent(kind, "0", other, (DeviceDigest("cpu:0", digest),))
            for kind, other, digest in zip(EventKind, others, digests, strict=True)
        )
        return (ProcessEvents(0, events),)

    def digests_of(self, mpmd_idx):
        shards = (ShardDigest("cpu:0", (), hash(self.groups[mpmd_idx].chain)),)
        values = {STATE: ValueDigest("float32[]", shards, False)}
        return ProcessDigests(mpmd_idx, 0, f"process {mpmd_idx}", ("cpu",), values)

    # Deaths.

    def die(self, mpmd_idx):
        self.groups[mpmd_idx].end()
        if self.is_attached:
            self.unheard.append(mpmd_idx)

    def hear(self):
        """The driver hears of the next death."""
        mpmd_idx = self.unheard.pop(0)
        for request in [each for each in self.left_out.pending if mpmd_idx in each.groups]:
            self.settle_unlogged(request, GroupDiedError(f"group {mpmd_idx} died", mpmd_idx))
        self.tell(Died(GroupDiedError(f"group {mpmd_idx} died", mpmd_idx)))

    def kill(self, mpmd_idx):
        self.die(mpmd_idx)
        self.hear()

    @property
    def dead(self):
        return {i for i, group in enumerate(self.groups) if not group.is_alive}

    @property
    def dead_logged(self):
        return self.dead.intersection(self.logged)

    # Jobs.

    def look(self, kinds):
        """These groups are to move, and why. One thread looks at a time."""
        self.looking = collections.deque(self.act(Done(do.Look(), kinds)))
        self.threads.append(self.looking)

    def is_blocked(self, job, expired=False):
        match job:
            case do.AwaitSaves() | do.AwaitDeath():
                return not expired and not self.membership.is_over(job)
            case job if isinstance(job, do.Wait):
                return not self.membership.is_over(job)
            case _ if self.membership.is_void(job):
                return False
            case do.CopyAway(attempt, _, _, (number,)):
                is_copied = len(self.copies.get(number, ())) == len(self.logged)
                return attempt == self.journal.attempt and not is_copied and not self.dead_logged
        return False

    def run(self, thread, fault=None, meanwhile=lambda: None):
        """A thread carries out its next job, which may have a fault. Other things may happen meanwhile."""
        job = thread.popleft()
        if self.membership.is_void(job):
            return
        meanwhile()
        try:
            if fault is not None:
                raise fault
            event = Done(job, self.run_job(job))
        except AssertionError:
            raise
        except Exception as error:
            thread.clear()
            event = self.faulted(job, error)
        self.done.append(job)
        thread.extend(self.act(event))

    def faulted(self, job, error):
        if isinstance(job, do.CopyAway):
            return Faulted(job, error, by_death=isinstance(error, ProcessLostError))
        if not isinstance(job, do.ReplacementJob) or isinstance(error, CopiesLostError | SupersededError):
            return Faulted(job, error)
        dead = {error.mpmd_idx} if isinstance(error, ProcessLostError) else self.dead
        return Faulted(job, error, frozenset(dead))

    def run_job(self, job):
        match job:
            case do.Detach():
                assert self.is_attached
                assert not self.left_out.pending, "what is not logged was lost"
                self.is_attached = False
                self.unheard.clear()
                for group in self.groups:
                    group.inbox.clear()
            case do.Kill(groups):
                for mpmd_idx in groups:
                    self.groups[mpmd_idx].end()
                    self.groups[mpmd_idx].is_open = False
                self.resetting -= groups
            case do.Reset(but):
                self.resetting = set(range(len(self.groups))) - but
                assert all(self.groups[mpmd_idx].is_open for mpmd_idx in self.resetting)
            case do.Start(groups):
                for mpmd_idx in groups:
                    group = self.groups[mpmd_idx]
                    assert not group.is_alive, "a group has two processes of a rank"
                    place = self.prepared.pop(mpmd_idx, group.place)
                    if place not in self.places:
                        assert self.membership.error is not None, "it was given back"
                        raise SupersededError
                    self.groups[mpmd_idx] = Group(place)
                    self.groups[mpmd_idx].is_open = self.groups[mpmd_idx].is_loaded = False
            case do.Open(groups):
                for mpmd_idx in self.resetting & self.dead:
                    error = ProcessLostError(f"group {mpmd_idx} has died", mpmd_idx)
                    for beside in self.act(Lost(mpmd_idx, error, node_is_gone=False)):
                        self.run_job(beside)
                if self.membership.error is not None:
                    raise SupersededError
                self.check_alive(groups, RuntimeError("it could not start"))
                for mpmd_idx in groups:
                    assert not self.groups[mpmd_idx].is_open
                    self.groups[mpmd_idx].is_open = True
            case do.AwaitReset():
                self.check_alive(self.resetting)
            case do.CheckCopies() | do.Connect() | do.ConnectDriver():
                self.check_alive()
                assert all(group.is_open for group in self.groups)
                return []
            case do.Load(groups):
                self.check_alive(groups)
                for mpmd_idx in groups:
                    self.groups[mpmd_idx].is_loaded = True
            case do.Restore(snapshot):
                self.check_alive()
                for mpmd_idx in self.logged:
                    self.groups[mpmd_idx].chain = self.copies[snapshot][mpmd_idx]
            case do.TakeDigests():
                self.check_alive(self.logged)
                return tuple(map(self.digests_of, sorted(self.logged)))
            case do.GoBack(_, snapshot):
                self.check_alive(self.logged)
                if self.loses_copies:
                    raise CopiesLostError("both copies are damaged")
                for mpmd_idx in self.logged:
                    group = self.groups[mpmd_idx]
                    assert not group.inbox, "a group goes back when it has answered all"
                    group.chain = self.copies[snapshot][mpmd_idx]
                return self.damaged
            case do.Look():
                self.places.add(next(self.numbers))
                return {}
            case do.Prepare(mpmd_idx):
                if self.has_place:
                    self.prepared[mpmd_idx] = next(self.numbers)
                    self.places.add(self.prepared[mpmd_idx])
                return self.has_place
            case do.Discard():
                self.prepared.clear()
            case do.StartSpares():
                self.places = {group.place for group in self.groups} | set(self.prepared.values())
            case do.FindDead():
                return self.dead
            case do.CopyAway(attempt):
                if attempt != self.journal.attempt:
                    raise SupersededError
                self.check_alive(self.logged)
            case do.Report(recovered):
                self.reports.append(recovered)
            case do.Release():
                for group in self.groups:
                    group.end()
                self.places.clear()
                self.prepared.clear()
        return None

    def check_alive(self, groups=None, error=None):
        if dead := self.dead & (self.dead if groups is None else set(groups)):
            raise error or ProcessLostError("a group has died", min(dead))

    def settle_inboxes(self):
        for mpmd_idx, group in enumerate(self.groups):
            while group.inbox:
                self.answer(mpmd_idx)

    # Until all is quiet.

    def run_threads(self, until=None, expired=False):
        """All threads go on, as far as they do by themselves; until one would carry out such a job."""
        for _ in range(MANY):
            self.threads = [thread for thread in self.threads if thread]
            ready = [thread for thread in self.threads if not self.is_blocked(thread[0], expired)]
            if until is not None and any(isinstance(thread[0], until) for thread in ready):
                return next(thread for thread in ready if isinstance(thread[0], until))
            if not ready:
                return None
            self.run(ready[0])
        raise AssertionError("threads go on for ever")

    def settle_all(self, until=None):
        """Groups answer all, the driver hears of all, and threads go on, until nothing happens any more."""
        for _ in range(MANY):
            if thread := self.run_threads(until):
                return thread
            if any(group.inbox for group in self.groups):
                self.answer(next(i for i, group in enumerate(self.groups) if group.inbox))
            elif self.unheard:
                self.hear()
            elif not any(not self.is_blocked(thread[0], expired=True) for thread in self.threads):
                return None
            elif thread := self.run_threads(until, expired=True):
                return thread
        raise AssertionError("something goes on for ever")

    def check_quiet(self):
        """Nobody waits for what does not come, and nothing is kept that nobody uses."""
        self.settle_all()
        assert self.threads == [] and self.futures == set()
        assert not self.membership.moves.is_paused or self.membership.error is not None
        if self.membership.error is None:
            assert self.dead == self.left_out.dead.keys() and self.membership.dead == {} and self.is_attached
            assert [self.groups[i].chain for i in self.logged] == [self.chain] * len(self.logged)
            assert all(self.groups[i].chain == self.known[i] for i in self.left_out.groups - self.dead)
            self.has_place = True
            self.replace(*self.left_out.groups)
            self.look({})
            self.settle_all()
            self.look({})
            self.settle_all()
            assert self.dead == set() or self.membership.error is not None
        if self.membership.error is None:
            assert self.places == {group.place for group in self.groups}, "reservations are given back"
            self.close()
            self.settle_all()
        assert len(self.dead) == len(self.groups) and self.places == set() and self.prepared == {}
