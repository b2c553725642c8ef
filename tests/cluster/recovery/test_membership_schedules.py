"""Membership in any order of requests, answers, faults, deaths, moves, snapshots, and the end of the mesh."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.recovery import actions as do
from cluster.recovery.allocations import NoAllocationError
from cluster.recovery.journal import BEGINNING
from cluster.recovery.keepers import CopiesLostError
from cluster.recovery.liveness_waiter import ProcessLostError
from cluster.recovery.report import DRAINED, GROWN, SHRUNK
from mpmd.runtime.nonfinite import NonFinitePolicy
from tests.support.membership_world import World

GROUPS = st.integers(0, 2)
LEFT_OUT = st.integers(3, 4)
UNTIL = st.sampled_from(
    [
        do.Start,
        do.Open,
        do.AwaitReset,
        do.CheckCopies,
        do.Connect,
        do.Restore,
        do.AwaitReplay,
        do.CopyAway,
        do.Prepare,
        do.FindDead,
        do.AwaitSnapshot,
        do.TakeDigests,
        do.GoBack,
        do.AwaitRepeated,
    ]
)
COUNTS = st.sampled_from([1, 2, 100])


class Schedules(RuleBasedStateMachine):
    """Events in any order. In the end all is answered once, all groups live, and nothing more is kept."""

    def __init__(self):
        super().__init__()
        self.world = World()
        self.saved = []

    @property
    def is_running(self):
        return self.world.membership.error is None

    @precondition(lambda self: self.world.may_submit)
    @rule(fails=st.sampled_from([False, False, False, True]), donated=st.booleans())
    def step(self, fails, donated):
        self.world.step((0,) if donated else (), fails)

    @precondition(lambda self: self.is_running)
    @rule(mpmd_idx=GROUPS)
    def fetch(self, mpmd_idx):
        """Also while groups are replaced."""
        self.world.fetch(mpmd_idx)

    @precondition(lambda self: self.is_running and self.world.membership.is_running)
    @rule(mpmd_idx=GROUPS)
    def save(self, mpmd_idx):
        self.saved.append(self.world.save(mpmd_idx))

    @precondition(lambda self: self.saved)
    @rule()
    def finish_saving(self):
        self.world.finish_saving(self.saved.pop())

    @precondition(lambda self: self.is_running and self.world.membership.is_running)
    @rule(refused=st.sampled_from([None, NonFinitePolicy(nans=True, infs=False)]))
    def rewind(self, refused):
        """All groups are to go back with nobody dead."""
        self.world.rewind(refused)

    @rule(mpmd_idx=GROUPS, count=COUNTS)
    def answer(self, mpmd_idx, count):
        for _ in range(count):
            if self.world.groups[mpmd_idx].inbox:
                self.world.answer(mpmd_idx)

    @rule(until=UNTIL, then=st.sampled_from(["fail", "fail", "die", "wait"]), data=st.data())
    def go_on_until(self, until, then, data):
        """Threads go on until one would carry out such a job; then that fails, or a group dies."""
        thread = self.world.run_threads(until)
        if thread is not None and then == "fail" and (faults := self.faults_of(thread)):
            self.world.run(thread, data.draw(st.sampled_from(faults), "fault"))
        if thread is not None and then == "die":
            self.die(data.draw(GROUPS, "mpmd_idx"))

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
        """A thread carries out some jobs."""
        world = self.world
        thread = data.draw(st.sampled_from(range(len(world.threads))), "thread")
        thread = world.threads[thread]
        for _ in range(count):
            if thread and not world.is_blocked(thread[0], expired):
                world.run(thread)
        world.threads = [thread for thread in world.threads if thread]

    def faults_of(self, thread):
        """A job may raise such an error, though no group has died."""
        match thread[0] if thread else None:
            case do.Start():
                return [NoAllocationError("no room")]
            case do.Open() | do.Connect():
                return [RuntimeError("its devices are in use")]
            case do.CheckCopies(snapshot) if snapshot != BEGINNING:
                return [CopiesLostError("both have died together")]
            case do.GoBack():
                return [CopiesLostError("both are damaged"), RuntimeError("Ray says no")]
            case do.Restore():
                return [ProcessLostError("group 1 is stuck", 1)]
            case do.CopyAway() as job if job.attempt == self.world.journal.attempt:
                return [MemoryError("no room for 3 GiB")]
            case do.Prepare() | do.FindDead(None) | do.StartSpares() | do.Discard():
                return [RuntimeError("Ray says no"), OSError("Ray is out of reach")]
        return []

    @precondition(lambda self: self.is_running and not self.is_looking)
    @rule(
        kinds=st.dictionaries(GROUPS, st.sampled_from([DRAINED, SHRUNK, GROWN]), max_size=2),
        has_place=st.booleans(),
    )
    def look(self, kinds, has_place):
        self.world.has_place = has_place
        self.world.look(kinds)

    @property
    def is_looking(self):
        return any(thread is self.world.looking for thread in self.world.threads)

    @precondition(lambda self: self.is_running)
    @rule(really=st.sampled_from([False] * 29 + [True]))
    def close(self, really):
        if really:
            self.world.close()

    @invariant()
    def nobody_waits_for_the_dead(self):
        """A wait for groups ends when the driver has heard of a death."""
        for thread in self.world.threads:
            job = thread[0] if thread else None
            if self.world.membership.dead and isinstance(job, do.AwaitSnapshot | do.AwaitReplay):
                assert self.world.membership.is_over(job)

    @invariant()
    def nobody_is_accused(self):
        """No wrong bits are reported, but for copies, whose loss was pretended."""
        assert {report.kind for report in self.world.corruptions} <= {"copy"}

    def teardown(self):
        for copy in self.saved:
            self.world.finish_saving(copy)
        self.world.check_quiet()


class SchedulesWithAPartLeftOut(Schedules):
    """As well with two groups that are left out. Their requests are answered once, by a result or a death."""

    def __init__(self):
        super().__init__()
        self.world = World(num_left_out=2)

    @precondition(lambda self: self.is_running and self.world.membership.is_running)
    @rule(mpmd_idx=LEFT_OUT)
    def sample(self, mpmd_idx):
        self.world.sample(mpmd_idx)

    @precondition(lambda self: self.is_running and self.world.membership.is_running)
    @rule(src=GROUPS, mpmd_idx=LEFT_OUT)
    def copy(self, src, mpmd_idx):
        self.world.sample(src, mpmd_idx)

    @rule(mpmd_idx=LEFT_OUT, count=COUNTS)
    def answer_left_out(self, mpmd_idx, count):
        self.answer(mpmd_idx, count)

    @rule(mpmd_idx=LEFT_OUT)
    def die_left_out(self, mpmd_idx):
        self.die(mpmd_idx)

    @precondition(lambda self: self.is_running and not self.is_looking)
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
        membership = self.world.membership
        only_left_out = membership.dead and membership.dead.keys() <= self.world.left_out.groups
        assert not only_left_out or self.world.membership.moves.is_paused


test_schedules = Schedules.TestCase
test_schedules_with_a_part_left_out = SchedulesWithAPartLeftOut.TestCase
