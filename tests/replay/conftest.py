"""A task of each kind, captured from one small step."""

import pytest

import mpmd
from tests.support.captured_tasks import TASKS, arguments, small_step
from tests.support.parity import mesh_of


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The directory of each task by its name, and the loss of each captured step and of one that was not."""
    directory = tmp_path_factory.mktemp("small")
    with mesh_of(2) as mesh:
        step = mpmd.jit(small_step, mesh, donate_argnums=0)
        losses = []
        state, *rest = arguments()
        for task in TASKS:
            state, loss = step.capture(state, *rest, task=task, to=directory / task)
            losses.append(float(loss))
        state, plain = arguments()[0], []
        for _ in TASKS:
            state, loss = step(state, *rest)
            plain.append(float(loss))
    return directory, losses, plain
