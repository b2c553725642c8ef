"""Groups, threads and places that only pretend, for the state machine of membership."""

import collections
import itertools
from concurrent.futures import Future

import numpy as np

from cluster.driver.calls.joined import failed
from cluster.recovery import Recovery, procedures
from cluster.recovery import actions as do
from cluster.recovery.allocations import NodeGoneError
from cluster.recovery.events import (
    Answered,
    Closed,
    CopyAsked,
    Copying,
    Died,
    Done,
    Faulted,
    Freed,
    RewindAsked,
    Sent,
    StepAsked,
    Unneeded,
    Wanted,
)
from cluster.recovery.journal import BEGINNING, Outcome
from cluster.recovery.logged import Asked, LoggedSnapshot, LoggedStep
from cluster.recovery.membership import Membership
from cluster.recovery.processes import SupersededError
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


class Processes:
    """In place of ``Processes``, ``Copies`` and ``Allocations``. Each method is a phase of ``procedures``."""

    def __init__(self, world):
        self.world = world
        self.allocations = self
        self.infos = ()

    def kill(self, groups):
        self.world.enter("kill", set(groups))
        for mpmd_idx in groups:
            self.world.groups[mpmd_idx].end()
            self.world.groups[mpmd_idx].is_open = False
        self.world.resetting = self.world.resetting - set(groups)
        return list(groups)

    def lose(self, numbers):
        pass

    def reset(self, but, programs):
        self.world.enter("reset")
        self.world.resetting = set(range(len(self.world.groups))) - but
        assert all(self.world.groups[mpmd_idx].is_open for mpmd_idx in self.world.resetting)

    def start(self, groups):
        self.world.enter("start", set(groups))
        for mpmd_idx in groups:
            group = self.world.groups[mpmd_idx]
            assert not group.is_alive, "a group has two processes of a rank"
            place = self.world.prepared.pop(mpmd_idx, group.place)
            if place not in self.world.places:
                assert self.world.membership.error is not None, "it was given back"
                raise SupersededError
            self.world.groups[mpmd_idx] = group = Group(place)
            group.is_open = group.is_loaded = False

    def open(self, groups, on_lost):
        self.world.enter("open", set(groups))
        for mpmd_idx in self.world.resetting & self.world.dead:
            on_lost(GroupDiedError(f"group {mpmd_idx} has died", mpmd_idx))
        if self.world.membership.error is not None:
            raise SupersededError
        self.world.check_alive(groups, RuntimeError("it could not start"))
        for mpmd_idx in groups:
            assert not self.world.groups[mpmd_idx].is_open
            self.world.groups[mpmd_idx].is_open = True

    def await_reset(self):
        self.world.enter("await_reset")
        self.world.check_alive(self.world.resetting)

    def check(self, snapshot):
        self.world.enter("check", snapshot)
        self.world.check_alive()
        return self.world.damaged

    def connect(self):
        self.world.enter("connect")
        self.world.check_alive()
        assert all(group.is_open for group in self.world.groups)

    def load(self, groups, loads):
        self.world.enter("load", set(groups))
        self.world.check_alive(groups)
        for mpmd_idx in groups:
            self.world.groups[mpmd_idx].is_loaded = True

    def restore(self, snapshot):
        self.world.enter("restore", snapshot)
        self.world.check_alive(self.world.logged)
        for mpmd_idx in self.world.logged:
            self.world.groups[mpmd_idx].chain = self.world.copies[snapshot][mpmd_idx]

    def connect_driver(self):
        self.world.enter("connect_driver")
        self.world.check_alive()
        return ["connection"]

    def find_dead(self):
        self.world.enter("find_dead")
        return self.world.dead

    def check_nodes(self, numbers):
        if self.world.gone:
            raise NodeGoneError


class World:
    """Carries out actions as the ``Shell`` does, on groups that only pretend.

    Jobs have phases, such as ``connect``: there a test has a fault raised, or something happen meanwhile, by
    ``at``. The last ``num_left_out`` groups are left out of recovery.

    Attributes:
      threads: the jobs that each has still to carry out.
      phases: the phases that were entered, each with its groups, its snapshot or nothing.
      gone: whether a node is, which explains all deaths.
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
        self.phases = []
        self.meanwhile = collections.defaultdict(list)
        self.is_acting = False
        self.gone = False
        self.processes = Processes(self)
        self.reports = []
        self.said = []
        self.given_back = []

    # Events.

    def tell(self, event):
        self.threads += map(collections.deque, self.act(event))

    def act(self, event):
        """The jobs that follow, a list for each thread."""
        is_cause, self.is_acting = not self.is_acting, True
        threads = [self.carry_out_all(self.membership.handle(event))]
        while is_cause and (actions := self.membership.advance()):
            threads.append(self.carry_out_all(actions))
        self.is_acting = not is_cause
        return [jobs for jobs in threads if jobs]

    def carry_out_all(self, actions):
        for action in actions:
            if not isinstance(action, do.Job):
                self.carry_out(action)
        return [action for action in actions if isinstance(action, do.Job)]

    def carry_out(self, action):
        match action:
            case do.Tell(outcomes):
                for request, mpmd_idx, result, error in outcomes:
                    self.settle((request, mpmd_idx), result if error is None else error)
            case do.Attach():
                assert not self.is_attached
                self.is_attached = True
            case do.LoseValues(losses):
                if not losses.keys() <= self.left_out.groups:
                    assert losses.keys() == set(self.logged)
                    self.chain = ()
                for mpmd_idx in self.left_out.groups & losses.keys():
                    assert self.groups[mpmd_idx].chain == ()
                    self.known[mpmd_idx] = ()
            case do.ReplayLog(entries):
                for group in self.groups:
                    assert group.is_open and group.is_loaded, "all were replaced as a whole"
                for entry in entries:
                    self.ask(entry)
            case do.MarkCommitted():
                assert self.journal.committed != BEGINNING
            case do.BeginSnapshot():
                self.begin_snapshot()
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
        self.tell(StepAsked())
        return step

    def request(self, donated):
        return StepRequest(0, self.num_steps, donated, (STATE,), donated=donated)

    def rewind(self, refused=None):
        self.tell(RewindAsked(None, refused))

    @property
    def may_submit(self):
        membership = self.membership
        if not membership.is_running:
            return False
        if membership.snapshot_is_late and self.journal.keeps_copies:
            self.tell(Unneeded())
        return membership.is_running and not membership.snapshot_is_late

    def sample(self, *mpmd_idxs):
        """A request that is not logged, such as a copy from a logged group to one that is left out."""
        request = Asked({mpmd_idx: self.request(()) for mpmd_idx in mpmd_idxs}, is_logged=False)
        self.tell(Sent(request))
        self.ask_first(request)
        if any(self.left_out.dead.get(mpmd_idx) for mpmd_idx in mpmd_idxs):
            self.end_unlogged(request, GroupDiedError("a group is dead", mpmd_idxs[-1]))
        return request

    def end_unlogged(self, request, death):
        """No group answers any more, since one of them is dead."""
        for mpmd_idx in sorted(request.waiting):
            self.tell(Answered(self.journal.attempt, Outcome(request, mpmd_idx, error=death)))

    def replace(self, *mpmd_idxs):
        self.tell(Wanted(frozenset(self.left_out.dead.keys() & set(mpmd_idxs))))

    def fetch(self, mpmd_idx):
        self.ask_first(self.journal.add({mpmd_idx: Fetch(0)}))

    def save(self, mpmd_idx):
        copy = next(self.numbers)
        self.tell(CopyAsked(copy))
        self.ask_first(self.journal.add({mpmd_idx: CopyOut(copy, ())}))
        return copy

    def finish_saving(self, copy):
        self.tell(Freed(copy))
        self.tell(Unneeded(frozenset([copy])))

    def close(self):
        self.tell(Closed(RuntimeError("the mesh was closed")))
        self.release()

    # What groups are asked.

    def ask_first(self, request):
        self.futures |= {(request, mpmd_idx) for mpmd_idx in request.groups}
        self.ask(request)

    def begin_snapshot(self):
        self.ask(self.journal.begin_snapshot(dict.fromkeys(self.logged, Released())))

    def ask(self, entry):
        is_snapshot = isinstance(entry, LoggedSnapshot)
        if not is_snapshot and entry.is_logged and not self.membership.is_running:
            return
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
        match entry:
            case Asked(is_logged=False):
                if mpmd_idx in entry.waiting:
                    self.carry_out_unlogged(mpmd_idx, entry)
                    self.tell(Answered(attempt, Outcome(entry, mpmd_idx, StepReply({}))))
            case LoggedSnapshot():
                self.copies.setdefault(number, {})[mpmd_idx] = group.chain
            case _:
                result, error = self.carry_out_request(mpmd_idx, entry)
                self.tell(Answered(attempt, Outcome(entry, mpmd_idx, result, error)))

    def carry_out_unlogged(self, mpmd_idx, request):
        """Functions give other values to groups that are left out; recovering groups only send values."""
        group = self.groups[mpmd_idx]
        if mpmd_idx in self.left_out.groups:
            assert request not in group.chain, "a request has run twice"
            self.known[mpmd_idx] = group.chain = (*group.chain, request)

    def carry_out_request(self, mpmd_idx, entry, is_repeated=False, refused=None):
        """The result of a request that is logged, and its error."""
        group = self.groups[mpmd_idx]
        match entry:
            case LoggedStep(failure=str() as why):
                return None, LostValueError(why)
            case LoggedStep() if entry in self.fails:
                return None, StepAborted("a fault") if mpmd_idx else TaskError("a fault", 0, "fwd_0__0")
            case LoggedStep() if is_repeated and entry in self.late:
                return None, StepTimeoutError("step 9 has taken longer than step_timeout=5 s")
            case LoggedStep() if refused and entry in self.refusing:
                return None, NonFiniteError("a nan", mpmd_idx, "fwd_0__0")
            case LoggedStep():
                assert entry.ordinal not in group.chain, "a step has run twice"
                is_wrong = self.flips[mpmd_idx] > 0
                self.flips[mpmd_idx] -= is_wrong
                group.chain = (*group.chain, entry.ordinal + is_wrong * next(self.numbers) / MANY)
                value, self.corrupts = hash(group.chain) + self.corrupts, False
                return StepReply({entry.ordinal: np.array(value)}, events=self.events_of(mpmd_idx)), None
            case _ if entry.kind is Fetch:
                return group.chain, None
            case _ if entry in self.unreadable:
                return None, RuntimeError("no such file")
        return StepReply({}) if entry.kind is Read else None, None

    def repeat(self, entries, refused):
        """The answers of groups to requests that are repeated, which all are there."""
        self.enter("repeat")
        answers = {}
        for entry in entries:
            for mpmd_idx in entry.groups:
                answer = Future()
                result, error = None, GroupDiedError(f"group {mpmd_idx} died", mpmd_idx)
                if self.groups[mpmd_idx].is_alive:
                    result, error = self.carry_out_request(mpmd_idx, entry, True, refused)
                if error is None:
                    answer.set_result(result)
                answers[entry, mpmd_idx] = answer if error is None else failed(error)
        return answers

    def events_of(self, mpmd_idx):
        others = (mpmd_idx - 1) % len(self.groups), (mpmd_idx + 1) % len(self.groups)
        digests = mpmd_idx in self.garbled, hash(self.groups[mpmd_idx].chain)
        events = tuple(
            DigestedEvent(kind, "0", other, (DeviceDigest("cpu:0", digest),))
            for kind, other, digest in zip(EventKind, others, digests, strict=True)
        )
        return (ProcessEvents(0, events),)

    def digests(self):
        self.enter("digests")
        self.check_alive(self.logged)
        return tuple(map(self.digests_of, sorted(self.logged)))

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
            self.end_unlogged(request, GroupDiedError(f"group {mpmd_idx} died", mpmd_idx))
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
        before = len(self.threads)
        self.tell(Done(do.Look(), kinds))
        self.looking = self.threads[before] if len(self.threads) > before else collections.deque()

    def is_blocked(self, job, expired=False):
        match job:
            case _ if self.membership.is_void(job):
                return False
            case do.AwaitCheckpoints():
                return not expired and self.membership.awaits(job)
            case do.AwaitDeath():
                is_dead = bool(self.dead - self.left_out.dead.keys())
                return is_dead and not expired and self.membership.awaits(job)
            case do.CopyAway(_, snapshot):
                return any(entry is snapshot for group in self.groups for _, entry, _ in group.inbox)
        return False

    def run(self, thread, fault=None):
        """A thread carries out its next job, which may have a fault."""
        job = thread.popleft()
        if self.membership.is_void(job):
            return
        try:
            if fault is not None:
                raise fault
            event = Done(job, self.run_job(job))
        except AssertionError:
            raise
        except Exception as error:
            event = Faulted(job, error, isinstance(job, do.CopyAway) and isinstance(error, GroupDiedError))
        self.done.append(job)
        threads = list(map(collections.deque, self.act(event)))
        if threads and not thread:
            thread.extend(threads.pop(0))
        self.threads += threads

    def run_job(self, job):
        match job:
            case do.Detach():
                assert self.is_attached
                assert not self.left_out.pending, "what is not logged was lost"
                self.enter("detach")
                self.is_attached = False
                self.unheard.clear()
                for group in self.groups:
                    group.inbox.clear()
            case do.Recover():
                return procedures.recover(job, self.processes, self.processes, {})
            case do.GoBack():
                self.check_answered()
                return procedures.go_back(job, self.processes)
            case do.Rewind():
                self.check_answered()
                return procedures.rewind(job, self.processes, self.repeat, self.digests)
            case do.Look():
                self.enter("look")
                self.places.add(next(self.numbers))
                return {}
            case do.Prepare(mpmd_idx):
                self.enter("prepare")
                if not self.has_place:
                    return None
                self.prepared[mpmd_idx] = next(self.numbers)
                self.places.add(self.prepared[mpmd_idx])
                return self.processes.find_dead()
            case do.Discard():
                self.prepared.clear()  # also if one cannot be killed: Ray ends a process that nobody has
                self.enter("discard")
            case do.StartSpares():
                self.enter("start_spares")
                self.places = {group.place for group in self.groups} | set(self.prepared.values())
            case do.AwaitDeath():
                self.processes.find_dead()
            case do.CopyAway(attempt):
                self.enter("copy_away")
                if attempt != self.journal.attempt:
                    raise SupersededError
                self.check_alive(self.logged)
            case do.ReportRecovery(report):
                self.enter("report")
                self.reports.append(report)
            case do.ReleaseAll():
                self.release()
        return None

    def check_answered(self):
        """Groups go back when they have answered all that the user was not told of by a death."""
        assert all(
            (entry, i) in self.told for i, group in enumerate(self.groups) for _, entry, _ in group.inbox
        )

    # Phases.

    def at(self, phase, *events):
        """Has these exceptions raised, or functions called, one after the other the next times of a phase."""
        self.meanwhile[phase] += events

    def enter(self, phase, of=None):
        self.phases.append((phase, of))
        if self.meanwhile[phase]:
            event = self.meanwhile[phase].pop(0)
            if isinstance(event, Exception):
                raise event
            event()

    def named(self, phase):
        """The groups or the snapshot of all times of a phase."""
        return [of for name, of in self.phases if name == phase]

    def release(self):
        for group in self.groups:
            group.end()
        self.places.clear()
        self.prepared.clear()

    def check_alive(self, groups=None, error=None):
        if dead := self.dead & (self.dead if groups is None else set(groups)):
            raise error or GroupDiedError("a group has died", min(dead))

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
        assert not self.membership.moves.is_under_way or self.membership.error is not None
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
