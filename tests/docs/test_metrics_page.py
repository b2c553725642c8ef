"""The recipes of ``docs/watching.md`` run."""

import struct
import sys
import types

import pytest
from tensorboardX.proto.event_pb2 import Event

import mpmd
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.pages import blocks, run
from tests.support.parity import mesh_of

LOOP, LOSS, TENSORBOARD, WANDB = blocks("watching.md")
NUM_STEPS = 12


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(2) as mesh:
        yield mesh


def train(mesh, names):
    """Runs the loop of the page with a ``write``, and returns the losses."""
    losses = []
    step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh)

    def recorded(state, *arguments):
        state, loss = step(state, *arguments)
        losses.append(loss := loss[0])
        return state, loss

    metrics = types.SimpleNamespace(metrics=lambda _, *args, **options: mpmd.metrics(step, *args, **options))
    batches = [batch()] * NUM_STEPS
    run([LOSS, LOOP], **names, mpmd=metrics, step=recorded, batches=batches, state=init(weights(2)))
    return [float(loss) for loss in losses]


def scalars(folder):
    """The points of each curve in the files of TensorBoard: a length, a checksum, an event, a checksum."""
    points = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            for value in event.summary.value:
                points.setdefault(value.tag, {})[event.step] = value.simple_value
    return points


def test_tensorboard(mesh, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = run([TENSORBOARD])
    losses = train(mesh, {"write": names["write"]})
    names["writer"].close()
    points = scalars(tmp_path / "runs" / "gpt")
    assert [*points["mpmd/step_seconds"]] == [*range(NUM_STEPS)]
    assert points["mpmd/loss"] == pytest.approx(dict(enumerate(losses)), rel=1e-6)
    assert min(points["mpmd/tokens_per_second"].values()) > 0


class Run:
    """Stands for that of Weights & Biases."""

    def __init__(self):
        self.logged, self.defined = [], []

    def log(self, data, step=None):
        self.logged.append(data)

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))


def test_weights_and_biases(mesh, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda project: Run()))
    names = run([WANDB])
    losses = train(mesh, {"write": names["write"]})
    logged = names["run"].logged
    times = [data for data in logged if "mpmd/step_seconds" in data]
    assert [data["mpmd/step"] for data in times] == [*range(NUM_STEPS)]
    assert all(data["mpmd/step_seconds"] > 0 for data in times)
    assert [data["mpmd/loss"] for data in logged if "mpmd/loss" in data] == losses
    assert names["run"].defined == [("mpmd/step", None), ("mpmd/*", "mpmd/step")]
