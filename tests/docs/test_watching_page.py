"""The recipes of ``docs/watching.md`` run; its names are in the code, and its queries in the dashboard."""

import json
import re
import struct
import sys
import types

import pytest
from tensorboardX.proto.event_pb2 import Event

import mpmd
from cluster.metrics import RunMetrics
from mpmd.runtime.step_meter import StepMeters
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.pages import DOCS, blocks, run
from tests.support.ray_metrics import Metric

TEXT = (DOCS / "watching.md").read_text()
DASHBOARD = json.loads((DOCS / "watching" / "grafana.json").read_text())
LOOP, LOSS, TENSORBOARD, WANDB = blocks("watching.md")
NUM_STEPS = 12
NAMES = set(re.findall(r"`([a-z_]+)`", TEXT[TEXT.index("a dict with") : TEXT.index("[`mpmd.metrics`]")]))
ROWS = re.findall(r"^\| `(ray_mpmd_\w+)`.*? \| (.*?) ?\| `(.*?)`.* \|$", TEXT, re.MULTILINE)
"""Of Ray's metrics: name, labels, query."""
ONLY_ON_DEVICES = {"device_memory_bytes", "device_memory_peak_bytes"}


def train(mesh, write):
    """Runs the loop of the page with a ``write``, and returns the losses."""
    losses = []
    step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh)

    def recorded(state, *arguments):
        state, loss = step(state, *arguments)
        losses.append(loss := loss[0])
        return state, loss

    metrics = types.SimpleNamespace(metrics=lambda _, *args, **options: mpmd.metrics(step, *args, **options))
    batches = [batch()] * NUM_STEPS
    run([LOSS, LOOP], write=write, mpmd=metrics, step=recorded, batches=batches, state=init(weights(2)))
    return [float(loss) for loss in losses]


def test_the_page_has_the_metrics_of_the_loop(mesh):
    written = []
    train(mesh, lambda number, values: written.append(values))
    of_steps = [values for values in written if "loss" not in values]
    assert len(of_steps) == NUM_STEPS
    assert all(values.keys() == NAMES - ONLY_ON_DEVICES for values in of_steps)


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
    losses = train(mesh, names["write"])
    names["writer"].close()
    points = scalars(tmp_path / "runs" / "gpt")
    assert [*points["mpmd/step_seconds"]] == [*range(NUM_STEPS)]
    assert points["mpmd/loss"] == pytest.approx(dict(enumerate(losses)), rel=1e-6)
    assert min(points["mpmd/tokens_per_second"].values()) > 0


class Run:
    """Stands for a run of Weights & Biases."""

    def __init__(self):
        self.logged, self.defined = [], []

    def log(self, data, step=None):
        self.logged.append(data)

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))


def test_weights_and_biases(mesh, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda project: Run()))
    names = run([WANDB])
    losses = train(mesh, names["write"])
    logged = names["run"].logged
    times = [data for data in logged if "mpmd/step_seconds" in data]
    assert [data["mpmd/step"] for data in times] == [*range(NUM_STEPS)]
    assert all(data["mpmd/step_seconds"] > 0 for data in times)
    assert [data["mpmd/loss"] for data in logged if "mpmd/loss" in data] == losses
    assert names["run"].defined == [("mpmd/step", None), ("mpmd/*", "mpmd/step")]


def test_the_table_has_the_metrics_of_a_mesh_with_their_labels(monkeypatch):
    made = Metric.in_place_of_rays(monkeypatch)
    RunMetrics(StepMeters(), ())
    labels = {metric.prometheus_name: {*metric.tag_keys} - {"run"} for metric in made}
    assert {name: {*re.findall(r"`(\w+)`", text)} for name, text, _ in ROWS} == labels


def test_the_dashboard_has_the_queries_of_the_page():
    targets = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["datasource"] == chosen for target in targets)
    queries = [target["expr"] for target in targets]
    assert all(query.count('{run=~"$run"}') == 1 for query in queries)
    assert sorted(query.replace('{run=~"$run"}', "") for query in queries) == sorted(row[2] for row in ROWS)
