"""The blocks of the tutorial run, in process; ``tests/ray/test_pages.py`` runs the block on Ray."""

import numpy as np
import pytest

from tests.support.tutorial import CELLS, ON_RAY, TEXT, run


@pytest.mark.slow  # `make docs` runs the page, too
def test_the_pipeline_computes_what_plain_jax_computes(monkeypatch, tmp_path):
    """Ten steps, of which it profiles five, and one from the checkpoint."""
    monkeypatch.chdir(tmp_path)
    names = run(CELLS, monkeypatch)
    assert len(names["losses"]) == 5
    np.testing.assert_allclose(names["losses"], names["plain_losses"][:5], rtol=1e-5)
    np.testing.assert_allclose(names["loss"], names["plain_losses"][9], rtol=1e-4)
    (resumed,) = names["resumed_losses"]
    _, expected = names["train"](names["jax"].jit(names["train_step"]), plain_state(names, 10), 1)
    np.testing.assert_allclose(resumed, expected[0], rtol=1e-4)
    assert (tmp_path / "step.svg").read_text().startswith("<?xml")
    assert len(names["profile"].recorded) == 5


def plain_state(names, num_steps):
    state = names["init_state"](names["jax"].random.key(0))
    return names["train"](names["jax"].jit(names["train_step"]), state, num_steps)[0]


def test_no_block_is_left_out():
    assert len(CELLS) + 1 == TEXT.count("```{code-cell}") + TEXT.count("```python")
    assert "mpmd.launch" in ON_RAY
