"""Membership in any order of requests, answers, faults, deaths, moves, snapshots, and the end of the mesh."""

import functools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.recovery.allocations import NoAllocationError
from cluster.recovery.copies import CopiesLostError
from cluster.recovery.ledger import State
from cluster.recovery.report import DRAINED, GROWN, SHRUNK
from mpmd.errors import GroupDiedError
from mpmd.runtime.nonfinite import NonFinitePolicy
from tests.support.membership_world import World

GROUPS = st.integers(0, 2)
LEFT_OUT = st.integers(3, 4)
PHASES = st.sampled_from(
    """detach kill reset start open await_reset check connect load restore digests repeat
    copy_away prepare find_dead discard start_spares look""".split()
)
FAULTS = {
    "start": [NoAllocationError("no room")],
    "open": [RuntimeError("its devices are in use")],
    "check": [CopiesLostError("both are lost"), RuntimeError("Ray says no")],
    "connect": [RuntimeError("its devices are in use")],
    "restore": [GroupDiedError("group 1 is stuck", 1)],
    "copy_away": [MemoryError("no room for 3 GiB")],
    "prepare": [RuntimeError("Ray says no"), OSError("Ray is out of reach")],
    "find_dead": [RuntimeError("Ray says no"), OSError("Ray is out of reach")],
    "discard": [OSError("Ray is out of reach")],
    "start_spares": [RuntimeError("Ray says no"), OSError("Ray is out of reach")],
}
"""Errors that may be raised in a phase though no group has died."""

COUNTS = st.sampled_from([1, 2, 100])


class Schedules(RuleBasedStateMachine):
    """Events in any order. In the end all is answered once, all groups live, and nothing more is kept."""

    def __init__(self):
        super().__init__()
        self.world = World()
        self.saved = []

    @property
    def is_running(self):
        return self.world.error is None

    @precondition(lambda self: self.world.may_submit)
    @rule(fails=st.sampled_from([False, False, False, True]), donated=st.booleans())
    def step(self, fails, donated):
        self.world.step(donated, fails)

    @precondition(lambda self: self.is_running)
    @rule(mpmd_idx=GROUPS)
    def fetch(self, mpmd_idx):
        """Also while groups are replaced."""
        self.world.fetch(mpmd_idx)

    @precondition(lambda self: self.is_running and self.world.is_running)
    @rule(mpmd_idx=GROUPS)
    def save(self, mpmd_idx):
        self.saved.append(self.world.save(mpmd_idx))

    @precondition(lambda self: self.saved)
    @rule()
    def finish_saving(self):
        self.world.finish_saving(self.saved.pop())

    @precondition(lambda self: self.is_running and self.world.is_running)
    @rule(refused=st.sampled_from([None, NonFinitePolicy(nans=True, infs=False)]))
    def rewind(self, refused):
        """All groups are to go back with nobody dead."""
        self.world.rewind(refused)

    @rule(mpmd_idx=GROUPS, count=COUNTS)
    def answer(self, mpmd_idx, count):
        for _ in range(count):
            if self.world.groups[mpmd_idx].inbox:
                self.world.answer(mpmd_idx)

    @rule(phase=PHASES, then=st.sampled_from(["fail", "fail", "die", "fetch", "close"]), data=st.data())
    def meanwhile(self, phase, then, data):
        """The next time of a phase something fails, or a group dies, or the user does something."""
        if then == "fail" and phase in FAULTS:
            self.world.at(phase, data.draw(st.sampled_from(FAULTS[phase]), "fault"))
        if then == "die":
            self.world.at(phase, functools.partial(self.die, data.draw(GROUPS, "mpmd_idx")))
        if then == "fetch":
            self.world.at(phase, functools.partial(self.fetch_if_running, data.draw(GROUPS, "mpmd_idx")))
        if then == "close" and data.draw(st.sampled_from([False] * 9 + [True]), "really"):
            self.world.at(phase, functools.partial(self.close, really=True))

    def fetch_if_running(self, mpmd_idx):
        if self.is_running:
            self.world.fetch(mpmd_idx)

    @rule()
    def settle(self):
        self.world.settle_all()

    @rule(mpmd_idx=GROUPS)
    def die(self, mpmd_idx):
        if self.world.groups[mpmd_idx].is_alive:
            self.world.die(mpmd_idx)

    @precondition(lambda self: self.world.unheard)
    @rule()
    def hear(self):
        self.world.hear()

    @precondition(lambda self: self.world.threads)
    @rule(data=st.data(), count=COUNTS, expired=st.booleans())
    def go_on(self, data, count, expired):
        """A thread goes on for some phases and waits."""
        world = self.world
        thread = world.threads[data.draw(st.sampled_from(range(len(world.threads))), "thread")]
        for _ in range(count):
            if thread.is_alive and thread.is_ready(expired):
                world.run(thread)

    @precondition(lambda self: self.is_running)
    @rule(
        kinds=st.dictionaries(GROUPS, st.sampled_from([DRAINED, SHRUNK, GROWN]), max_size=2),
        has_place=st.booleans(),
    )
    def look(self, kinds, has_place):
        self.world.has_place = has_place
        self.world.look(kinds)

    @precondition(lambda self: self.is_running)
    @rule(really=st.sampled_from([False] * 29 + [True]))
    def close(self, really):
        if really:
            self.world.close()

    @invariant()
    def nobody_waits_for_the_dead(self):
        """After a death groups are replaced at once, or when requests that are not logged are answered."""
        world = self.world
        if world.ledger.dead and self.is_running:
            assert world.ledger.state is State.RECOVERING
            assert world.threads or world.ledger.unlogged

    @invariant()
    def nobody_is_accused(self):
        """No wrong bits are reported, but for copies, whose loss was pretended."""
        assert {report.kind for report in self.world.corruptions} <= {"copy"}

    def teardown(self):
        self.world.meanwhile.clear()
        for copy in self.saved:
            self.world.finish_saving(copy)
        self.world.check_quiet()


class SchedulesWithAPartLeftOut(Schedules):
    """As well with two groups that are left out. Their requests are answered once, by a result or a death."""

    def __init__(self):
        super().__init__()
        self.world = World(num_left_out=2)

    @precondition(lambda self: self.is_running and self.world.is_running)
    @rule(mpmd_idx=LEFT_OUT)
    def sample(self, mpmd_idx):
        self.world.sample(mpmd_idx)

    @precondition(lambda self: self.is_running and self.world.is_running)
    @rule(src=GROUPS, mpmd_idx=LEFT_OUT)
    def copy(self, src, mpmd_idx):
        self.world.sample(src, mpmd_idx)

    @rule(mpmd_idx=LEFT_OUT, count=COUNTS)
    def answer_left_out(self, mpmd_idx, count):
        self.answer(mpmd_idx, count)

    @rule(mpmd_idx=LEFT_OUT)
    def die_left_out(self, mpmd_idx):
        self.die(mpmd_idx)

    @precondition(lambda self: self.is_running)
    @rule(
        kinds=st.dictionaries(LEFT_OUT, st.sampled_from([DRAINED, GROWN]), max_size=1),
        mpmd_idxs=st.sets(LEFT_OUT),
        has_place=st.booleans(),
    )
    def replace(self, kinds, mpmd_idxs, has_place):
        self.world.replace(*mpmd_idxs)
        self.look(kinds, has_place)

    @invariant()
    def the_others_do_not_go_back_for_a_death(self):
        """Unless one of them has died, has failed or moves, too, or the user asks for it."""
        dead = self.world.ledger.dead.keys()
        assert not dead or not dead <= set(self.world.left_out) or self.world.moves.under_way


test_schedules = Schedules.TestCase
test_schedules_with_a_part_left_out = SchedulesWithAPartLeftOut.TestCase
