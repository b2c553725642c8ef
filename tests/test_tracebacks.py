"""Tracebacks of errors show the user's frames: ours are hidden by the rule and the switch of JAX."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from tests.support.parity import mesh_of

ROOT = Path(__file__).parents[1]
OURS = tuple(str(ROOT / package) for package in ("mpmd", "cluster"))
STDLIB = ("contextlib.py", "concurrent/futures/_base.py", "threading.py")

WEIGHTS = [np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32) / 2]
X = np.ones((4, 4), np.float32)


@pytest.fixture
def filtering(request):
    """Sets JAX's filtering of tracebacks; tests run without it."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", getattr(request, "param", "auto"))
    yield
    jax.config.update("jax_traceback_filtering", before)


def step_of(loss, schedule=None):
    def step(weights, x):
        grad_fn = mpmd.value_and_grad(loss, num_microbatches=2, schedule=schedule or mpmd.Std1F1B(2))
        loss_value, grads = grad_fn(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss_value

    return step


def good_loss(w, x):
    return jnp.mean((mpmd.mark_stage_end(x @ w[0]) @ w[1]) ** 2)


def loss_of_three_stages(w, x):
    return jnp.mean(mpmd.mark_stage_end(mpmd.mark_stage_end(mpmd.mark_stage_end(x @ w[0]) @ w[1]) @ w[1]))


def loss_of_wrong_shapes(w, x):
    return jnp.mean(jax.lax.dot(mpmd.mark_stage_end(x @ w[0]), jnp.ones((3, 3))))


def loss_with_a_nan(w, x):
    return jnp.mean(mpmd.mark_stage_end(x @ w[0]) @ jnp.log(w[1] - 1))


def call(loss):
    return mpmd.jit(step_of(loss), mesh_of(2))(WEIGHTS, X)


def failing_step():
    with jax.debug_nans(True):
        return call(loss_with_a_nan)


def read_of_a_failed_step():
    return np.asarray(failing_step()[0][0])


def float_of_a_failed_step():
    return float(failing_step()[1])


def jax_function_of_a_failed_step():
    return jax.lax.neg(failing_step()[0][1])


MISTAKES = {
    "marks": (lambda: call(loss_of_three_stages), "3 calls of mark_stage_end"),
    "shapes in the loss": (lambda: call(loss_of_wrong_shapes), "dot"),
    "argument of jit": (lambda: mpmd.jit(step_of(good_loss), mesh_of(2), donate_argnums=7), "donate_argnums"),
    "argument of jit as a decorator": (lambda: mpmd.jit(mpmd_mesh=mesh_of(2))(7), "fun must"),
    "keyword of jit": (lambda: mpmd.jit(step_of(good_loss), mesh_of(2), backend="cpu"), "backend"),
    "argument of a step": (lambda: mpmd.jit(step_of(good_loss), mesh_of(2))(WEIGHTS, "x"), "is a str"),
    "argument of lower": (lambda: mpmd.jit(step_of(good_loss), mesh_of(2)).lower(WEIGHTS, "x"), "is a str"),
    "value_and_grad": (lambda: mpmd.value_and_grad(good_loss, num_microbatches=0), "num_microbatches"),
    "grad": (lambda: mpmd.grad(good_loss, num_microbatches=0), "num_microbatches"),
    "plain jit": (lambda: jax.jit(step_of(loss_of_wrong_shapes))(WEIGHTS, X), "dot"),
    "treduce": (lambda: mpmd.treduce(jnp.sum, [], mpmd.Std1F1B(1)), "at least one array"),
    "mesh": (lambda: mpmd.MpmdMesh(3, "stage"), "jax_mesh"),
    "explain": (lambda: mpmd.explain(3), "step must be"),
    "np.asarray": (read_of_a_failed_step, "nan"),
    "float": (float_of_a_failed_step, "nan"),
    "a function of JAX": (jax_function_of_a_failed_step, "nan"),
}


def error_of(mistake):
    with pytest.raises(Exception) as caught:  # of any type, which other tests check
        mistake()
    return caught.value


def files_of(error):
    """The files of all frames of an error and its causes."""
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    return [frame.filename for one in chain for frame in traceback.extract_tb(one.__traceback__)]


@pytest.mark.usefixtures("filtering")
@pytest.mark.parametrize("name", MISTAKES)
def test_no_frame_is_of_this_project(name):
    mistake, message = MISTAKES[name]
    error = error_of(mistake)
    assert message in str(error).lower() or message in str(error)
    files = files_of(error)
    assert not [file for file in files if file.startswith(OURS) or file.endswith(STDLIB)]
    assert __file__ in files
    assert len(error.__notes__) == 1
    assert "JAX_TRACEBACK_FILTERING=off" in error.__notes__[0]


@pytest.mark.usefixtures("filtering")
def test_the_function_of_the_user_is_the_last_frame():
    names = [
        frame.name
        for frame in traceback.extract_tb(error_of(MISTAKES["shapes in the loss"][0]).__traceback__)
    ]
    assert names[-3:] == ["call", "step", "loss_of_wrong_shapes"]


@pytest.mark.usefixtures("filtering")
def test_a_failed_step_that_is_read_again_shows_who_reads_it_now():
    _, loss = failing_step()

    def first():
        float(loss)

    def second():
        float(loss)

    for read in (first, second, second):
        error = error_of(read)
        frames = traceback.extract_tb(error.__traceback__)
        assert [frame.name for frame in frames] == ["error_of", read.__name__]
        assert len(error.__notes__) == 1


@pytest.mark.parametrize("name", ["marks", "argument of jit", "np.asarray"])
@pytest.mark.parametrize("filtering", ["off"], indirect=True)
@pytest.mark.usefixtures("filtering")
def test_the_switch_shows_all_frames(name):
    error = error_of(MISTAKES[name][0])
    assert [file for file in files_of(error) if file.startswith(OURS)]
    assert not getattr(error, "__notes__", [])


@pytest.mark.parametrize("filtering", ["remove_frames"], indirect=True)
@pytest.mark.usefixtures("filtering")
def test_the_whole_traceback_may_be_the_cause():
    error = error_of(MISTAKES["argument of jit"][0])
    frames = traceback.extract_tb(error.__traceback__)
    assert not [frame for frame in frames if frame.filename.startswith(OURS)]
    assert "excludes JAX-internal frames" in str(error.__cause__)


def test_a_warning_has_the_line_of_the_user(mesh):
    with pytest.warns(mpmd.StepWarning) as caught:
        mpmd.jit(step_of(lambda w, x: good_loss(w, jnp.ones((2, 4)))), mesh).lower(WEIGHTS, X)
    assert {warning.filename for warning in caught} == {__file__}
