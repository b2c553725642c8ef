"""What the benchmarks measure that has to hold."""

import pytest

from benchmarks.init_memory import measure


@pytest.mark.slow
def test_the_driver_holds_nothing_of_a_state_that_groups_make():
    megabytes = 64
    ours, plain = measure(megabytes, "on_groups"), measure(megabytes, "in_one_process")
    assert ours.grown < megabytes / 2
    assert plain.grown >= 3 * megabytes
