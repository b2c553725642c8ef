"""Arrays in parts on Ray actors."""

import jax

import mpmd
from tests.support.digests import digests
from tests.support.models import batch
from tests.support.stacked_state import compiled, initial_state


def test_a_stack_is_made_trained_and_stored_by_its_groups(two_groups, tmp_path):
    step = compiled(two_groups, mpmd.Std1F1B(2), num_stages=2)
    state = step.init(initial_state)
    expected = jax.jit(initial_state)()
    assert digests(mpmd.to_host(state)) == digests(expected)
    w = state[0]["layers"]["w"]
    assert [part.mpmd_idxs for part in w.parts] == [(0,), (1,)]
    assert [part.shape[0] for part in w.parts] == [4, 3]
    state, first = step(state, *batch())
    assert w.is_deleted()
    mpmd.save(tmp_path / "saved", state)
    loss = float(step(state, *batch())[1])
    again = step.restore(tmp_path / "saved")
    assert float(step(again, *batch())[1]) == loss != float(first)
