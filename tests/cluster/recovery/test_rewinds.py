"""Groups go back with nobody dead, and have the same values afterwards; all of them only pretend."""

import pytest

from cluster.recovery import Recovery
from cluster.recovery.copies import CopiesLostError
from cluster.recovery.journal import BEGINNING
from cluster.recovery.report import CORRUPTED, DIED, DRAINED, FAILED
from mpmd.errors import SilentCorruptionError
from mpmd.runtime.nonfinite import NonFinitePolicy
from tests.support import membership_world
from tests.support.membership_world import World

NANS = NonFinitePolicy(nans=True, infs=False)
PHASES = ["digests", "check", "restore", "repeat"]


def committed(steps=2, **options):
    return membership_world.committed(Recovery(every=100, max_failures=2, **options), steps)


def phases(world):
    return [name for name, _ in world.phases if name in PHASES]


def has_wrong_bits(world, mpmd_idx):
    """The group computes wrong bits in its next step."""
    return lambda: world.flips.update({mpmd_idx: 1})


def chains(world):
    return [group.chain for group in world.groups]


def ended(world):
    return [(rewound.found and rewound.found.step, rewound.is_interrupted) for rewound in world.rewound]


# Without faults.


def test_all_go_back_and_have_the_same_values_again():
    world = committed()
    world.rewind()
    assert not world.is_running
    world.settle_all()
    assert phases(world) == [*PHASES, "digests"]
    assert chains(world) == [(1, 2, 3)] * 3
    assert ended(world) == [(None, False)] and world.corruptions == []
    assert world.journal.num_steps == 2, "the journal has them for the next time"
    world.step()
    world.check_quiet()


def test_what_is_asked_meanwhile_is_answered_afterwards():
    world = committed()
    world.rewind()
    world.at("repeat", lambda: world.fetch(1))
    world.settle_all()
    assert [future.result(0) for (_, i), future in world.futures.items()][-1] == (1, 2, 3)
    world.check_quiet()


def test_groups_repeat_after_the_first_step_and_after_so_many():
    world = World(Recovery(every=100, verify_every=3))
    checked = []
    for number in range(1, 9):
        world.step()
        world.settle_all()
        if len(world.rewound) > len(checked):
            checked.append(number)
    assert checked == [1, 4, 7] and world.corruptions == []
    world.check_quiet()


@pytest.mark.parametrize("verify_every", [1, 2, 3, 4, 7])
def test_snapshots_are_taken_however_often_groups_repeat_their_steps(verify_every):
    world = World(Recovery(every=3, verify_every=verify_every))
    for _ in range(12):
        world.step()
        world.settle_all()
        assert world.journal.num_steps <= 4
    assert world.journal.committed != BEGINNING and world.corruptions == []
    world.check_quiet()


def test_a_group_moves_though_groups_repeat_their_steps_while_its_process_starts():
    world = committed()
    world.settle_all()
    world.look({1: DRAINED})
    world.at("prepare", world.rewind)
    world.settle_all()
    assert ended(world) == [(None, False)]
    assert world.reported == [(DRAINED, {1})]
    world.check_quiet()


def test_a_checkpoint_that_is_gone_ends_the_run():
    """Values that it had cannot be read again."""
    world = committed(steps=0)
    world.read(0)
    world.step()
    world.settle_all()
    world.rewind()
    world.at("check", lambda: setattr(world, "unreadable", True))
    world.settle_all()
    assert "reading from storage failed on group 0" in str(world.error)
    assert "checkpoints that stay" in str(world.error)
    world.check_quiet()


def test_a_checkpoint_that_is_being_saved_keeps_groups_from_it():
    world = World(Recovery(every=100, verify_every=1))
    copy = world.save(0)
    world.step()
    world.settle_all()
    assert world.rewound == []
    world.finish_saving(copy)
    world.settle_all()
    world.step()
    world.settle_all()
    assert len(world.rewound) == 1
    world.check_quiet()


# Wrong bits.


@pytest.mark.parametrize(
    ("reaction", "when"),
    [
        ("raise", "before"),
        ("raise", "again"),
        ("replace", "before"),
        ("replace", "again"),
        ("warn", "before"),
    ],
)
def test_a_group_that_is_wrong_in_one_run_is_named(reaction, when):
    """It has computed wrong bits in the ordinary run, or when it was repeated: both tell that it did."""
    world = committed(on_corruption=reaction)
    if when == "before":
        world.flips[1] = 1
    world.settle_all()
    world.rewind()
    if when == "again":
        world.at("repeat", has_wrong_bits(world, 1))
    world.settle_all()
    (report,) = world.corruptions
    assert (report.kind, report.mpmd_idxs, report.step) == ("computed", (1,), 2)
    assert report.devices == ("cpu:0",) and report.places == ("process 1",)
    assert "group 1 (process 1; cpu:0) has computed or kept other bits in step 2" in str(report)
    assert phases(world).count("repeat") == 1
    if reaction == "raise":
        assert isinstance(world.error, SilentCorruptionError)
        assert world.error.mpmd_idxs == (1,)
    else:
        assert chains(world) == [(1, 2, 3)] * 3
        replaced = [(CORRUPTED, {1})] if reaction == "replace" else []
        assert world.reported == replaced
        world.rewind()  # what is compared now is the run whose values groups have
        world.settle_all()
        assert len(world.corruptions) == 1
        world.kill(2)  # what the user was told is not taken for what is right
        world.settle_all()
        assert world.error is None
    world.check_quiet()


@pytest.mark.parametrize("reaction", ["raise", "replace", "warn"])
def test_a_message_that_changes_on_its_way_does_not_tell_which_group_is_wrong(reaction):
    world = committed(on_corruption=reaction)
    world.garbled.add(1)
    world.settle_all()
    world.garbled.clear()
    world.rewind()
    world.settle_all()
    (report,) = world.corruptions
    assert (report.kind, report.mpmd_idxs, report.step) == ("unlocated", (0, 1), 2)
    assert world.reports == []
    error = world.error
    if reaction == "warn":
        assert error is None and chains(world) == [(1, 2, 3)] * 3
    else:
        assert isinstance(error, SilentCorruptionError) and error.mpmd_idxs == (0, 1)
        assert ('on_corruption="replace" replaces no group' in str(error)) == (reaction == "replace")
    world.check_quiet()


@pytest.mark.parametrize("refused", [None, NANS])
def test_a_repeated_step_that_takes_too_long_is_no_wrong_bit(refused):
    world = committed()
    world.settle_all()
    (late, _) = world.journal.repeatable
    world.late.add(late.ordinal)
    world.rewind(refused)
    world.settle_all()
    assert world.corruptions == [] and world.error is None
    assert ended(world) == [(None, True)]
    assert "step 9 has taken longer" in str(world.rewound[0].late)
    assert world.reported == [(FAILED, set())]
    assert chains(world) == [(1, 2, 3)] * 3
    world.check_quiet()


def test_the_check_after_one_that_took_too_long_is_as_many_steps_later():
    world = World(Recovery(every=100, verify_every=3))
    checked = []
    for number in range(1, 6):
        world.late.add(world.step())
        world.settle_all()
        if len(world.rewound) > len(checked):
            checked.append(number)
    assert checked == [1, 4] and world.corruptions == []
    world.check_quiet()


def test_damaged_copies_are_reported():
    world = committed()
    world.damaged = ("group 0 has a damaged copy",)
    world.rewind()
    world.settle_all()
    assert [(report.kind, "damaged copy" in str(report)) for report in world.corruptions] == [("copy", True)]
    assert world.error is None
    world.check_quiet()


def test_without_good_copies_groups_stay_as_they_are():
    world = committed()
    world.at("check", CopiesLostError("both copies are damaged"))
    world.rewind()
    world.settle_all()
    assert [report.kind for report in world.corruptions] == ["copy"]
    assert phases(world) == ["digests", "check"]
    assert chains(world) == [(1, 2, 3)] * 3
    world.check_quiet()


def test_copies_that_are_lost_when_groups_have_gone_back_once_are_lost_to_all():
    """Groups have failed where a NaN was refused, so they cannot stay as they are."""
    world = committed()
    world.settle_all()
    world.refusing.update(step.ordinal for step in world.journal.repeatable)
    world.rewind(NANS)
    lost = CopiesLostError("both copies are damaged")
    world.at("check", lambda: None, lost, lost)
    world.settle_all()
    assert world.reported == [(FAILED, set(), str(lost))]
    assert world.corruptions == [] and ended(world) == [(None, True)]
    world.check_quiet()


# NaNs.


def test_the_first_step_that_makes_a_nan_is_found_and_all_is_as_before():
    world = committed(steps=3)
    world.settle_all()
    (_, step, _) = world.journal.repeatable
    world.refusing.add(step.ordinal)
    world.rewind(NANS)
    world.settle_all()
    assert ended(world) == [(3, False)] and world.corruptions == []
    assert world.rewound[0].found.task == "fwd_0__0"
    assert phases(world).count("repeat") == 2
    assert chains(world) == [(1, 2, 3, 4)] * 3
    world.check_quiet()


def test_without_a_nan_the_steps_are_repeated_once():
    world = committed()
    world.rewind(NANS)
    world.settle_all()
    assert ended(world) == [(None, False)]
    assert phases(world).count("repeat") == 1
    world.check_quiet()


# Deaths, failed steps and the end of the mesh meanwhile.


@pytest.mark.parametrize("phase", PHASES)
def test_a_group_that_dies_meanwhile_is_replaced(phase):
    world = committed()
    world.rewind()
    world.at(phase, lambda: world.kill(0))
    world.settle_all()
    assert ended(world) == [(None, True)] and world.reported == [(DIED, {0})]
    assert chains(world) == [(1, 2, 3)] * 3
    world.check_quiet()


def test_a_step_that_has_failed_has_groups_go_back_for_it():
    world = committed()
    world.step(is_donated=True, fails=True)
    world.rewind()
    world.settle_all()
    assert ended(world) == [(None, True)]
    assert world.reported == [(FAILED, set())]
    world.check_quiet()


@pytest.mark.parametrize("phase", PHASES)
def test_the_mesh_is_closed_meanwhile(phase):
    world = committed()
    world.rewind()
    world.at(phase, world.close)
    world.settle_all()
    world.check_quiet()
