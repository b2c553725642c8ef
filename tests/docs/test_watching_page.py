"""The loop of ``docs/watching.md`` runs; its names are in the code, and its queries in the dashboard."""

import itertools
import json
import re
from pathlib import Path

import jsonschema
import pytest

import mpmd
from cluster.metrics import RunMetrics
from mpmd.runtime.step_meter import StepMeters
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of
from tests.support.ray_metrics import Metric

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "watching.md").read_text()
DASHBOARD = json.loads((DOCS / "watching" / "grafana.json").read_text())
LOOP, *_ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
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
    names = {
        "mpmd": mpmd,
        "step": mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh),
        "write": write,
        "log_loss": lambda number, loss: None,
        "pending": (),
        "batches": [batch()] * 3,
        "state": init(weights(2)),
    }
    exec(LOOP, names)


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


TEXT_TYPE, DATASOURCE = (
    {"type": "string", "minLength": 1},
    {
        "type": "object",
        "required": ["type", "uid"],
        "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
        "additionalProperties": False,
    },
)
SCHEMA = {
    "type": "object",
    "required": ["title", "schemaVersion", "panels", "templating", "editable", "graphTooltip", "time"],
    "properties": {
        "title": TEXT_TYPE,
        "uid": {"type": "string", "pattern": "^[A-Za-z0-9_-]{8,40}$"},
        "tags": {"type": "array", "items": TEXT_TYPE},
        "timezone": {"enum": ["browser", "utc"]},
        "editable": {"type": "boolean"},
        "graphTooltip": {"enum": [0, 1, 2]},
        "refresh": {"type": "string", "pattern": "^[0-9]+[smhd]$"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "version": {"type": "integer", "minimum": 0},
        "time": {
            "type": "object",
            "required": ["from", "to"],
            "properties": {"from": TEXT_TYPE, "to": TEXT_TYPE},
        },
        "templating": {
            "type": "object",
            "properties": {
                "list": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "type", "query", "hide", "skipUrlSync"],
                        "properties": {
                            "type": {"enum": ["query", "datasource", "custom", "constant", "interval"]},
                            "hide": {"enum": [0, 1, 2]},
                            "datasource": DATASOURCE,
                        },
                    },
                }
            },
        },
        "annotations": {"type": "object"},
        "links": {"type": "array"},
        "panels": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["id", "type", "title", "datasource", "gridPos", "fieldConfig", "targets"],
                "properties": {
                    "id": {"type": "integer", "minimum": 1},
                    "type": {"const": "timeseries"},
                    "title": TEXT_TYPE,
                    "description": TEXT_TYPE,
                    "datasource": DATASOURCE,
                    "gridPos": {
                        "type": "object",
                        "required": ["h", "w", "x", "y"],
                        "properties": {
                            "h": {"type": "integer", "minimum": 1},
                            "w": {"type": "integer", "minimum": 1, "maximum": 24},
                            "x": {"type": "integer", "minimum": 0, "maximum": 23},
                            "y": {"type": "integer", "minimum": 0},
                        },
                        "additionalProperties": False,
                    },
                    "fieldConfig": {
                        "type": "object",
                        "required": ["defaults", "overrides"],
                        "properties": {"overrides": {"type": "array"}},
                    },
                    "options": {"type": "object"},
                    "targets": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["refId", "expr", "legendFormat", "datasource"],
                            "properties": {"refId": TEXT_TYPE, "expr": TEXT_TYPE, "datasource": DATASOURCE},
                        },
                    },
                },
                "additionalProperties": False,
            },
        },
    },
    "additionalProperties": False,
}
"""Of a dashboard in Grafana's classic model, as far as this one uses it: Grafana's ``dashboard_kind.cue``."""


def test_the_dashboard_is_one_of_grafana():
    jsonschema.Draft202012Validator(SCHEMA).validate(DASHBOARD)
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid({**DASHBOARD, "panels": [{"id": 1}]})
    panels = DASHBOARD["panels"]
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
