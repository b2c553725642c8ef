"""Arrays in parts on Ray actors."""

import jax

import mpmd
from tests.support.digests import digests
from tests.support.models import batch
from tests.support.stacked_state import compiled, initial_state


def test_a_stack_is_made_trained_and_stored_by_its_groups(four_groups, tmp_path):
    step = compiled(four_groups, mpmd.Eager1F1B(4), num_stages=4)
    state = step.init(initial_state)
    expected = jax.jit(initial_state)()
    assert digests(mpmd.to_host(state)) == digests(expected)
    w = state[0]["layers"]["w"]
    assert [part.mpmd_idxs for part in w.parts] == [(0,), (1,), (2,), (3,)]
    assert [part.shape[0] for part in w.parts] == [2, 2, 2, 1]
    state, first = step(state, *batch())
    assert w.is_deleted()
    mpmd.save(tmp_path / "saved", state)
    loss = float(step(state, *batch())[1])
    again = step.restore(tmp_path / "saved")
    assert float(step(again, *batch())[1]) == loss != float(first)
