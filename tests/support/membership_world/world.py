"""A runtime that recovers, on groups that only pretend: what its user does, and what happens meanwhile."""

import collections
import itertools

from cluster.recovery import Recovery
from cluster.recovery.journal import BEGINNING
from cluster.recovery.rewinds import RewindRequest
from cluster.recovery.runtime import RecoveringRuntime
from mpmd.errors import GroupDiedError
from mpmd.runtime.requests import CopyOut, Fetch, Read, StepRequest, Write
from tests.support.membership_world.answers import DONATED, MANY, STATE, carry_out
from tests.support.membership_world.groups import Group, Groups
from tests.support.membership_world.processes import Processes
from tests.support.membership_world.threads import Condition, Thread


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
      flips: by group, the number of its next steps in which it computes wrong bits.
      unreadable: whether reads fail from now on.
      refusing: the steps that make a NaN, which is an error where it is refused.
      late: the steps that take too long when they are repeated.
      garbled: the groups that receive messages with other bits than they were sent with.
      rewound: the ends of rewinds.
      places: the places that are reserved; and by group, the places of prepared processes.
      shares_with: by group, the group whose devices it shares.
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

    def request(self, step, is_donated=False, output=STATE):
        donated = (DONATED,) if is_donated else ()
        return StepRequest(0, step, donated, (output,), donated=donated)

    def sample(self, *mpmd_idxs):
        """A request that is not logged, such as a copy from a logged group to one that is left out."""
        step, output = self.runtime.next_step(), self.runtime.next_handle()
        return self.ask(step, {mpmd_idx: self.request(step, output=output) for mpmd_idx in mpmd_idxs})

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
        result, error = carry_out(self, mpmd_idx, request)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

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
            assert (
                self.dead == self.ledger.left_out.dead.keys()
                and self.ledger.dead == {}
                and self.driver.is_attached
            )
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
