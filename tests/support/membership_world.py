"""Groups, threads and places that only pretend, below a runtime that recovers.

Threads of the runtime run one at a time, when the test has them go on, from one phase or wait to the next.
"""

import collections
import itertools
import threading
from concurrent.futures import Future

import numpy as np

from cluster.driver.calls.joined import failed
from cluster.protocol.process_info import ProcessInfo
from cluster.recovery import Recovery
from cluster.recovery.journal import BEGINNING
from cluster.recovery.ledger import State
from cluster.recovery.lock import Lock
from cluster.recovery.processes import SupersededError
from cluster.recovery.report import SHRUNK
from cluster.recovery.rewinds import RewindRequest
from cluster.recovery.runtime import RecoveringRuntime
from cluster.recovery.store import Snapshot
from mpmd.errors import GroupDiedError, NonFiniteError, StepAborted, StepTimeoutError, TaskError
from mpmd.runtime.digests import (
    DigestedMessage,
    ProcessDigests,
    ShardDigest,
    ValueDigest,
)
from mpmd.runtime.lost_values import LostValueError
from mpmd.runtime.requests import CopyOut, Digests, Fetch, Read, StepReply, StepRequest, Write

MANY = 10**4
STATE, DONATED = 10**6, 10**6 + 1
"""The handles of what steps make, and take over."""


class Thread:
    """A thread that runs only within ``go_on``.

    Attributes:
      at: the phase or wait where it has stopped.
      condition: what it waits for; and whether the wait has a time limit.
    """

    def __init__(self, operation):
        self.at, self.condition, self.may_expire = "begin", None, False
        self.is_alive, self.fault = True, None
        self._turns = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(operation,), daemon=True)
        self._thread.start()

    def _run(self, operation):
        self._turns[0].acquire()
        try:
            operation()
        except BaseException as fault:
            self.fault = fault
        self.is_alive = False
        self._turns[1].release()

    def is_ready(self, expired=False):
        return self.condition is None or self.condition() or (expired and self.may_expire)

    def go_on(self):
        self._turns[0].release()
        self._turns[1].acquire()
        if self.fault is not None:
            raise self.fault

    def stop(self, at, condition=None, may_expire=False):
        self.at, self.condition, self.may_expire = at, condition, may_expire
        self._turns[1].release()
        self._turns[0].acquire()


class Condition(Lock):
    """A ledger's lock, of which a thread that would wait stops until the test has it go on."""

    def __init__(self, world):
        super().__init__()
        self.world = world

    def wait_for(self, condition, timeout=None):
        if not condition():
            assert self.world.running is not None, "the test itself would wait"
            with self._released():
                self.world.running.stop("wait", condition, timeout is not None)
        return condition()


class Awaited(Future):
    """The answer of a group to the request for a snapshot, for which a thread waits."""

    def __init__(self, world):
        super().__init__()
        self.world = world

    def result(self, timeout=None):
        if not self.done():
            self.world.running.stop("copied", self.done)
        return super().result(0)


class Group:
    """A group's process, if it has one, and where it runs. It answers requests in order."""

    def __init__(self, place):
        self.place = place
        self.is_alive = self.is_open = self.is_loaded = True
        self.inbox = collections.deque()
        self.chain = ()  # the steps that have made its values
        self.copied = set()  # for storage

    def end(self):
        self.is_alive = False
        self.inbox.clear()


class Groups:
    """In place of the ``RayRuntime``: requests come to the inboxes of groups.

    Attributes:
      pending: the futures of all groups, by request.
      heard: the groups of whose death the driver has heard.
    """

    left_out = frozenset()

    def __init__(self, world, num_groups):
        self.world = world
        self.processes_per_group = (1,) * num_groups
        self.pending = []
        self.heard = {}
        self.is_attached = True

    def ask(self, requests):
        kind = type(next(iter(requests.values())))
        if self.world.processes.stop.is_set():
            return {i: failed(RuntimeError("the mesh was closed")) for i in requests}
        if kind is Digests:
            return self.digests(requests)
        if self.world.ledger.state is State.RECOVERING:
            return {i: self.world.repeat(i, request) for i, request in requests.items()}
        assert self.is_attached
        if dead := self.heard.keys() & requests.keys():
            return {i: failed(self.heard[min(dead)]) for i in requests}
        futures = {i: Awaited(self.world) if kind is Snapshot else Future() for i in requests}
        self.pending.append(futures)
        for i, request in requests.items():
            if self.world.groups[i].is_alive:
                self.world.groups[i].inbox.append((request, futures[i]))
        return futures

    def digests(self, requests):
        self.world.enter("digests")
        died = {i: GroupDiedError(f"group {i} died", i) for i in self.world.dead}
        return {i: failed(died[i]) if i in died else self.world.digests_of(i) for i in requests}

    def hear(self, error):
        self.heard[error.mpmd_idx] = error
        for futures in self.pending:
            if error.mpmd_idx in futures:
                fail(futures.values(), error)

    def detach(self, reason):
        world = self.world
        world.enter("detach")
        assert self.is_attached
        world.claim(not world.ledger.unlogged, "what is not logged was lost")
        self.is_attached = False
        world.unheard.clear()
        for group in world.groups:
            group.inbox.clear()
        for futures in self.pending:
            fail(futures.values(), reason)
        self.pending.clear()

    def attach(self, calls):
        self.heard, self.is_attached = {}, True
        for group in self.world.groups:
            self.world.claim(group.is_open and group.is_loaded, "all were replaced as a whole")

    def death_of(self, mpmd_idx):
        return self.heard.get(mpmd_idx)

    def release(self, *released):
        pass

    unload = release

    def ask_health(self):
        self.world.phases.append(("health", None))

    def close(self):
        for futures in self.pending:
            fail(futures.values(), RuntimeError("closed"))


def fail(futures, error):
    for future in futures:
        if not future.done():
            future.set_exception(error)


class Processes:
    """In place of ``Processes``, ``Copies``, ``Spares`` and ``Allocations``. Its methods are phases."""

    def __init__(self, world):
        self.world = world
        self.allocations = self.spares = self
        self.stop = threading.Event()
        self.num_own, self.can_share = len(world.groups), True

    @property
    def infos(self):
        shares_with = self.world.shares_with
        return [
            ProcessInfo(i, 0, "host", "id", 100 + i, (), (), shares_with=shares_with.get(i))
            for i in range(len(self.world.groups))
        ]

    def calls(self, connections, on_death):
        self.on_death = on_death

    def kill(self, groups):
        self.world.enter("kill", set(groups))
        for mpmd_idx in groups:
            self.world.groups[mpmd_idx].end()
            self.world.groups[mpmd_idx].is_open = False
        self.world.resetting = self.world.resetting - set(groups)
        return list(groups)

    def lose(self, *numbers):
        pass

    def mark_committed(self):
        self.world.phases.append(("mark_committed", self.world.journal.committed))

    def reset(self, but, programs):
        self.world.enter("reset")
        self.world.resetting = set(range(len(self.world.groups))) - but
        are_open = all(self.world.groups[mpmd_idx].is_open for mpmd_idx in self.world.resetting)
        self.world.claim(are_open, "a process that has no connections is reset")

    def start(self, groups):
        self.world.enter("start", set(groups))
        self.check_open()
        for mpmd_idx in groups:
            group = self.world.groups[mpmd_idx]
            self.world.claim(not group.is_alive, "a group has two processes of a rank")
            place = self.world.prepared.pop(mpmd_idx, group.place)
            self.world.claim(place in self.world.places, "the place was given back")
            self.world.groups[mpmd_idx] = group = Group(place)
            group.is_open = group.is_loaded = False

    def open(self, groups):
        self.world.enter("open", set(groups))
        self.check_open()
        self.world.check_alive(groups, RuntimeError("it could not start"))
        for mpmd_idx in groups:
            self.world.claim(not self.world.groups[mpmd_idx].is_open, "a process takes its devices twice")
            self.world.groups[mpmd_idx].is_open = True

    def check_open(self):
        if self.stop.is_set():
            raise SupersededError

    def await_reset(self):
        self.world.enter("await_reset")
        self.world.check_alive(self.world.resetting)

    def check(self, snapshot):
        self.world.enter("check", snapshot)
        self.world.check_alive()
        return self.world.damaged

    def go_back(self, snapshot):
        damaged = self.check(snapshot)
        self.restore(snapshot)
        return damaged

    def connect(self):
        self.world.enter("connect")
        self.world.check_alive()
        self.world.claim(all(group.is_open for group in self.world.groups), "some have no devices")
        return []

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
            self.world.groups[mpmd_idx].copied.clear()

    def copy_away(self, snapshot, base, is_wanted):
        self.world.enter("copy_away")
        if not is_wanted():
            raise SupersededError
        self.world.check_alive(self.world.logged)

    def find_dead(self):
        self.world.enter("find_dead")
        return self.world.dead | self.world.silent

    def without_node(self):
        return {0} if self.world.gone else set()

    def groups_to_move(self):
        self.world.enter("look")
        self.world.places.add(next(self.world.numbers))
        return self.world.kinds

    def prepare_move(self, mpmd_idx, kind):
        self.world.enter("prepare")
        self.check_open()
        if self.world.has_place:
            self.world.prepared[mpmd_idx] = next(self.world.numbers)
            self.world.places.add(self.world.prepared[mpmd_idx])
            self.world.shares_with[mpmd_idx] = 0 if kind == SHRUNK else None
        return self.world.has_place

    def discard(self):
        self.world.prepared.clear()  # also if one cannot be killed: Ray ends a process that nobody has
        self.world.enter("discard")

    def start_missing(self):
        self.world.enter("start_spares")
        self.world.places = {group.place for group in self.world.groups} | set(self.world.prepared.values())

    def release(self):
        self.stop.set()
        for group in self.world.groups:
            group.end()
        self.world.places.clear()
        self.world.prepared.clear()


class World:
    """A runtime that recovers, on groups that only pretend.

    Its threads stop at phases, such as ``connect``: there a test has a fault raised, or something happen
    meanwhile, by ``at``. The last ``num_left_out`` groups are left out of recovery.

    Attributes:
      threads: those that have not ended.
      phases: the phases that were entered, each with its groups, its snapshot or nothing.
      gone: whether a node is, which explains all deaths.
      silent: the groups that do not answer, though they live.
      unheard: the groups whose deaths the driver has not heard of.
      futures: what the user waits for, or was told, by a name and the group.
      chain: the steps that have made the values of the user.
      copies: the chain of each group, by snapshot.
      flips: the groups that compute wrong bits, each in so many of its next steps.
      unreadable: whether reads fail from now on.
      refusing: the steps that make a NaN, which is an error where it is refused.
      late: the steps that take too long when they are repeated.
      garbled: the groups that receive messages with other bits than they were sent with.
      rewound: the ends of rewinds.
      places: those that are reserved; and those of processes that were prepared, by group.
      shares_with: of which group a group shares the devices.
      said: what the user was told beside reports.
      broken: the claims that did not hold.
    """

    def __init__(self, policy=None, num_groups=3, num_left_out=0):
        self.logged = range(num_groups)
        num_groups += num_left_out
        self.left_out = range(len(self.logged), num_groups)
        self.groups = [Group(place) for place in range(num_groups)]
        self.running, self.threads = None, []
        self.processes, self.driver = Processes(self), Groups(self, num_groups)
        self.reports, self.corruptions, self.said, self.rewound = [], [], [], []
        self.runtime = RecoveringRuntime(
            self.driver,
            self.processes,
            self.processes,
            policy or Recovery(every=3, max_failures=3),
            self.reports.append,
            self.corruptions.append,
            left_out=self.left_out,
        )
        self.ledger, self.supervisor = self.runtime._ledger, self.runtime._supervisor
        self.journal, self.moves = self.ledger.journal, self.supervisor.moves
        self.ledger.changed = Condition(self)
        background, rewinds = self.supervisor.background, self.supervisor.rewinds
        background.start = lambda name, operation: self.begin(lambda: background._run(operation))
        background.say = lambda text: isinstance(text, str) and self.said.append(text)
        ended = rewinds._end
        rewinds._end = lambda rewound: (rewinds.asked and self.rewound.append(rewound), ended(rewound))
        repeat = self.ledger.repeat
        self.ledger.repeat = lambda *arguments: (self.enter("repeat"), repeat(*arguments))[1]
        lose = self.ledger.lose_values
        self.ledger.lose_values = lambda losses: (lose(losses), self.lose_values(losses))
        self.supervisor.attach([])
        self.known = dict.fromkeys(self.left_out, ())  # what the user knows of their chains
        self.numbers = itertools.count(num_groups)
        self.unheard, self.resetting, self.broken = [], set(), []
        self.fails, self.unreadable, self.refusing = set(), False, set()
        self.late, self.garbled, self.damaged = set(), set(), ()
        self.flips = collections.Counter()
        self.chain, self.futures = (), {}
        self.copies = {BEGINNING: dict.fromkeys(self.logged, ())}
        self.places, self.prepared, self.has_place = set(range(num_groups)), {}, True
        self.kinds, self.shares_with = {}, {}
        self.gone, self.silent = False, set()
        self.phases, self.meanwhile = [], collections.defaultdict(list)

    def claim(self, holds, text):
        """Claims are checked when a thread stops: it may take an error for the fault of a group."""
        if not holds:
            self.broken.append(text)

    def lose_values(self, losses):
        if not losses.keys() <= set(self.left_out):
            self.chain = ()
        for mpmd_idx in losses.keys() & set(self.left_out):
            self.claim(self.groups[mpmd_idx].chain == (), "a new process has old values")
            self.known[mpmd_idx] = ()

    # What the user does.

    @property
    def error(self):
        return self.ledger.error

    @property
    def is_running(self):
        return self.ledger.is_running

    @property
    def may_submit(self):
        return self.ledger.is_running and self.ledger._may_submit()

    def ask(self, name, requests):
        asked = self.runtime.ask(requests)
        self.futures |= {(name, mpmd_idx): future for mpmd_idx, future in asked.items()}
        for future in asked.values():
            future.add_done_callback(lambda _: self.claim(not self.ledger.changed._depth, "the lock is held"))
        return name

    def step(self, is_donated=False, fails=False):
        step = self.runtime.next_step()
        if fails:
            self.fails.add(step)
        else:
            self.chain = (*self.chain, step)
        return self.ask(step, {i: self.request(step, is_donated) for i in self.logged})

    def request(self, step, is_donated=False):
        donated = (DONATED,) if is_donated else ()
        return StepRequest(0, step, donated, (STATE,), donated=donated)

    def sample(self, *mpmd_idxs):
        """A request that is not logged, such as a copy from a logged group to one that is left out."""
        step = self.runtime.next_step()
        return self.ask(step, {mpmd_idx: self.request(step) for mpmd_idx in mpmd_idxs})

    def read(self, mpmd_idx):
        return self.ask(f"read {next(self.numbers)}", {mpmd_idx: Read({})})

    def fetch(self, mpmd_idx):
        return self.ask(f"fetch {next(self.numbers)}", {mpmd_idx: Fetch(STATE)})

    def save(self, mpmd_idx):
        copy = self.runtime.next_handle()
        self.ask(f"copy {copy}", {mpmd_idx: CopyOut(copy, ())})
        return copy

    def write(self, mpmd_idx, copy):
        return self.ask(f"write {next(self.numbers)}", {mpmd_idx: Write(copy, [["spec"]])})

    def finish_saving(self, copy):
        self.runtime.free(tuple(self.logged), copy)
        with self.ledger.changed:
            self.ledger.drop_copies({copy})

    def rewind(self, refused=None):
        with self.ledger.changed:
            self.supervisor.rewinds.ask(RewindRequest(refused))

    def replace(self, *mpmd_idxs):
        self.ledger.left_out.wanted.update(self.ledger.left_out.dead.keys() & set(mpmd_idxs))

    def close(self):
        self.runtime.close()

    def told(self, name, mpmd_idx=0):
        """What the user was told: a result or an error; ``None`` if nothing yet."""
        future = self.futures[name, mpmd_idx]
        return (future.exception(0) or future.result(0)) if future.done() else None

    # What groups do.

    def answer(self, mpmd_idx):
        """A group carries out the next request, and says so."""
        request, future = self.groups[mpmd_idx].inbox.popleft()
        if future.done():
            return  # a group that takes part in the step is dead
        result, error = self.carry_out(mpmd_idx, request)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def carry_out(self, mpmd_idx, request, is_repeated=False):
        """The result of a request, and its error."""
        group = self.groups[mpmd_idx]
        match request:
            case Snapshot(number):
                self.copies.setdefault(number, {})[mpmd_idx] = group.chain
            case Fetch():
                return group.chain, None
            case Read() if self.unreadable:
                return None, RuntimeError("no such file")
            case Read():
                return StepReply({}), None
            case CopyOut(copy):
                group.copied.add(copy)
            case Write(copy):
                self.claim(copy in group.copied, "what is written was not copied before")
                return [16], None
            case StepRequest():
                return self.carry_out_step(mpmd_idx, request, is_repeated)
        return None, None

    def carry_out_step(self, mpmd_idx, request, is_repeated):
        group, step = self.groups[mpmd_idx], request.step
        is_logged = step in self.chain or step in self.fails
        if request.failed is not None:
            return None, LostValueError(request.failed)
        if step in self.fails:
            return None, StepAborted("a fault") if mpmd_idx else TaskError("a fault", 0, "fwd_0__0")
        if is_repeated and step in self.late:
            return None, StepTimeoutError("step 9 has taken longer than step_timeout=5 s")
        if request.refused and step in self.refusing:
            return None, NonFiniteError("a nan", mpmd_idx, "fwd_0__0")
        if not is_logged and mpmd_idx in self.logged:
            return StepReply({}), None  # it only sends values
        self.claim(step not in group.chain, "a step has run twice")
        is_wrong = self.flips[mpmd_idx] > 0
        self.flips[mpmd_idx] -= is_wrong
        group.chain = (*group.chain, step + is_wrong * next(self.numbers) / MANY)
        if not is_logged:
            self.known[mpmd_idx] = group.chain
            return StepReply({}), None
        value = np.array(hash(group.chain))
        return StepReply({step: value}, messages=self.messages_of(mpmd_idx)), None

    def repeat(self, mpmd_idx, request):
        """The answer of a group to a request that is repeated, which is there at once."""
        if not self.groups[mpmd_idx].is_alive:
            return failed(GroupDiedError(f"group {mpmd_idx} died", mpmd_idx))
        result, error = self.carry_out(mpmd_idx, request, is_repeated=True)
        return failed(error) if error is not None else done(result)

    def messages_of(self, mpmd_idx):
        others = (mpmd_idx - 1) % len(self.groups), (mpmd_idx + 1) % len(self.groups)
        digests = mpmd_idx in self.garbled, hash(self.groups[mpmd_idx].chain)
        messages = tuple(
            DigestedMessage(is_received, 0, other, {"cpu:0": digest})
            for is_received, other, digest in zip((True, False), others, digests, strict=True)
        )
        return {0: messages}

    def digests_of(self, mpmd_idx):
        shards = (ShardDigest("cpu:0", (), hash(self.groups[mpmd_idx].chain)),)
        values = {STATE: ValueDigest("float32[]", shards, False)}
        return done((ProcessDigests(mpmd_idx, 0, f"process {mpmd_idx}", ("cpu",), values),))

    # Deaths.

    def die(self, mpmd_idx):
        self.groups[mpmd_idx].end()
        if self.driver.is_attached:
            self.unheard.append(mpmd_idx)

    def hear(self):
        """The driver hears of the next death."""
        mpmd_idx = self.unheard.pop(0)
        error = GroupDiedError(f"group {mpmd_idx} died", mpmd_idx)
        self.driver.hear(error)
        self.processes.on_death(error)

    def kill(self, mpmd_idx):
        self.die(mpmd_idx)
        self.hear()

    @property
    def dead(self):
        return {i for i, group in enumerate(self.groups) if not group.is_alive}

    @property
    def dead_left_out(self):
        return self.ledger.left_out.dead.keys()

    def check_alive(self, groups=None, error=None):
        if dead := self.dead & (self.dead if groups is None else set(groups)):
            raise error or GroupDiedError("a group has died", min(dead))

    # Phases.

    def look(self, kinds):
        """These groups are to move, and why."""
        self.kinds = kinds
        self.moves.look_after()

    def at(self, phase, *events):
        """Has these exceptions raised, or functions called, one after the other the next times of a phase."""
        self.meanwhile[phase] += events

    def enter(self, phase, of=None):
        if self.running is not None:
            self.running.stop(phase)
        self.phases.append((phase, of))
        if self.meanwhile[phase]:
            event = self.meanwhile[phase].pop(0)
            if isinstance(event, Exception):
                raise event
            event()

    def named(self, phase):
        """The groups or the snapshot of all times of a phase."""
        return [of for name, of in self.phases if name == phase]

    @property
    def reported(self):
        """Of each report its kind, its groups, and why values were lost, if they were."""
        return [
            (each.kind, set(each.mpmd_idxs), *([each.lost] if each.lost else [])) for each in self.reports
        ]

    # Threads.

    def begin(self, operation):
        """A thread of the user's, which may wait. What it raises, ``settle_all`` raises."""
        self.threads.append(Thread(operation))
        return self.threads[-1]

    def run(self, thread):
        """A thread goes on to its next phase or wait."""
        before, self.running = self.running, thread
        try:
            thread.go_on()
        finally:
            self.running = before
            self.threads = [each for each in self.threads if each.is_alive]
        assert self.broken == []

    def run_threads(self, until=None, expired=False):
        """All threads go on, as far as they do by themselves, or until one is at a phase."""
        for _ in range(MANY):
            if until is not None and any(thread.at == until for thread in self.threads):
                return True
            ready = [thread for thread in self.threads if thread.is_ready(expired)]
            if not ready or (expired and self.unheard):  # who waits for a death in vain, waits again
                return False
            self.run(ready[0])
        raise AssertionError("threads go on for ever")

    def settle_all(self, until=None):
        """Groups answer all, the driver hears of all, and threads go on, until nothing happens any more.

        Returns: whether a thread has come to the phase ``until``.
        """
        for _ in range(MANY):
            if self.run_threads(until):
                return True
            if any(group.inbox for group in self.groups):
                self.answer(next(i for i, group in enumerate(self.groups) if group.inbox))
            elif self.unheard:
                self.hear()
            elif not any(thread.is_ready(expired=True) for thread in self.threads):
                return False
            elif self.run_threads(until, expired=True):
                return True
        raise AssertionError("something goes on for ever")

    def check_quiet(self):
        """Nobody waits for what does not come, and nothing is kept that nobody uses."""
        self.settle_all()
        assert self.threads == [] and all(future.done() for future in self.futures.values())
        if self.error is None:
            assert self.dead == self.dead_left_out and self.ledger.dead == {} and self.driver.is_attached
            assert [self.groups[i].chain for i in self.logged] == [self.chain] * len(self.logged)
            assert all(self.groups[i].chain == self.known[i] for i in set(self.left_out) - self.dead)
            self.has_place = True
            self.replace(*self.left_out)
            for _ in range(2):
                self.look({})
                self.settle_all()
            assert self.dead == set() or self.error is not None
        if self.error is None:
            assert self.places == {group.place for group in self.groups}, "reservations are given back"
            self.close()
            self.settle_all()
        assert len(self.dead) == len(self.groups) and self.places == set() and self.prepared == {}


def committed(policy=None, steps=1):
    """A world of which a snapshot is committed, and some steps are under way since."""
    world = World(policy or Recovery(every=100, max_failures=1))
    world.step()
    world.settle_all()
    assert world.journal.committed != BEGINNING
    for _ in range(steps):
        world.step()
    return world


def done(result):
    future = Future()
    future.set_result(result)
    return future
