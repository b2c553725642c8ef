"""The loop of ``docs/watching.md`` runs; its names are in the code, and its queries in the dashboard."""

import itertools
import json
import re

import pytest

import mpmd
from cluster.metrics import RunMetrics
from mpmd.runtime.step_meter import StepMeters
from tests.support import pages
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.pages import DOCS
from tests.support.parity import mesh_of
from tests.support.ray_metrics import Metric

TEXT = (DOCS / "watching.md").read_text()
DASHBOARD = json.loads((DOCS / "watching" / "grafana.json").read_text())
LOOP = pages.blocks("watching.md")[:1]
NAMES = set(re.findall(r"`([a-z_]+)`", TEXT[TEXT.index("a dict with") : TEXT.index("[`mpmd.metrics`]")]))
ROWS = re.findall(r"^\| `(ray_mpmd_\w+)`.*? \| (.*?) ?\| `(.*?)`.* \|$", TEXT, re.MULTILINE)
"""Of Ray's metrics: name, labels, query."""
ONLY_ON_DEVICES = {"device_memory_bytes", "device_memory_peak_bytes"}


@pytest.fixture(scope="module")
def mesh():
    with mesh_of(2) as mesh:
        yield mesh


def run(mesh, write):
    """Runs the loop of the page with a ``write``, for three steps."""
    pages.run(
        LOOP,
        mpmd=mpmd,
        step=mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh),
        write=write,
        log_loss=lambda number, loss: None,
        pending=(),
        batches=[batch()] * 3,
        state=init(weights(2)),
    )


def test_the_page_has_the_metrics_of_the_loop(mesh):
    written = []
    run(mesh, lambda number, values: written.append(values))
    assert len(written) == 3
    assert all(values.keys() == NAMES - ONLY_ON_DEVICES for values in written)


def test_the_table_has_the_metrics_of_a_mesh_with_their_labels(monkeypatch):
    made = Metric.in_place_of_rays(monkeypatch)
    RunMetrics(StepMeters(), ())
    labels = {metric.prometheus_name: {*metric.tag_keys} - {"run"} for metric in made}
    assert {name: {*re.findall(r"`(\w+)`", text)} for name, text, _ in ROWS} == labels


def test_the_dashboard_is_one_of_grafana():
    """As far as a test sees it: each panel has its place, and asks the source of data that is chosen."""
    panels, chosen = DASHBOARD["panels"], {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels:
        assert panel["type"] == "timeseries" and panel["title"]
        assert all(each["datasource"] == chosen and each["legendFormat"] for each in panel["targets"])
    assert {each["name"] for each in DASHBOARD["templating"]["list"]} == {"datasource", "run"}
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        cell
        for panel in panels
        for cell in itertools.product(
            range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"]),
            range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"]),
        )
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def test_the_dashboard_has_the_queries_of_the_page():
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert all(query.count('{run=~"$run"}') == 1 for query in queries)
    assert sorted(query.replace('{run=~"$run"}', "") for query in queries) == sorted(row[2] for row in ROWS)
