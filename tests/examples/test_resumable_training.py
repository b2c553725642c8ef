"""The driver's death: a run that was killed and goes on has the losses of an undisturbed one, bit by bit."""

import os
import re
import signal

import pytest

from tests.examples.test_examples import run_example

STEPS, KILLED_AT, EVERY = 7, 5, 2


def run(directory, words="", returncode=0):
    """What the example printed, and its losses by step, as it printed all their digits."""
    sizes = f"--directory {directory} --steps {STEPS} --every {EVERY}"
    printed = run_example(f"resumable_training {sizes} {words}", returncode=returncode)
    return printed, {int(step): loss for step, loss in re.findall(r"^step (\d+): loss (\S+)$", printed, re.M)}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "--ray"], ids=["here", "ray"])
def test_a_killed_run_goes_on_to_the_same_losses(where, tmp_path):
    _, undisturbed = run(tmp_path / "undisturbed", where)
    assert list(undisturbed) == list(range(1, STEPS + 1))
    assert len(set(undisturbed.values())) == STEPS

    killed = tmp_path / "killed"
    _, before = run(killed, f"{where} --kill-at {KILLED_AT}", returncode=-signal.SIGKILL)
    printed, after = run(killed, where)

    # The checkpoint after step 4 may not have been complete; the one after step 2 was, before it was begun.
    resumed_after = int(re.search(r"^resumed after step (\d+)$", printed, re.M)[1])
    assert resumed_after in (2, 4)
    assert list(before) == list(range(1, KILLED_AT + 1))
    assert list(after) == list(range(resumed_after + 1, STEPS + 1))
    assert before.items() <= undisturbed.items()
    assert after.items() <= undisturbed.items()
    assert sorted(os.listdir(killed)) == ["6", "7"]


@pytest.mark.slow
def test_a_run_whose_groups_all_die_goes_on_with_new_ones(tmp_path):
    _, undisturbed = run(tmp_path / "undisturbed")
    printed, losses = run(tmp_path / "killed", f"--ray --kill-groups-at {KILLED_AT}")
    assert losses == undisturbed
    assert "the state is lost" in printed
    assert re.search(r"^resumed after step [24]$", printed, re.M)
