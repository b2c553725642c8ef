"""Frozen data goes to JSON and back by its types, and each fault is named by its place."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from mpmd.ir.tasks import AnyTask, Task, parse_task
from mpmd.util.json_data import JsonFormat


class Span(NamedTuple):
    start: int
    label: str | None


@dataclasses.dataclass(frozen=True)
class Leaf:
    sizes: tuple[int, ...]
    spec: tuple[str | tuple[str, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class Other:
    seconds: float


@dataclasses.dataclass(frozen=True)
class Tree:
    members: tuple[Leaf | Other, ...]
    spans: tuple[Span, ...]
    edges: frozenset[tuple[int, int]]
    by_name: Mapping[str, int]
    by_edge: Mapping[tuple[int, int], bool]
    task: AnyTask
    maybe: Leaf | None = None
    unsaved: object = dataclasses.field(default=None, compare=False)


FORMAT = JsonFormat({AnyTask: parse_task})

TREE = Tree((Other(1.0),), (Span(1, None),), frozenset(), {"a": 1}, {(0, 1): True}, Task("fwd", 0, 0))


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (("spans", 0, 0), "1", r"spans\[0\]\[0\]: expected an integer, not '1'"),
        (("spans", 0, 0), True, r"spans\[0\]\[0\]: expected an integer, not True"),
        (("spans", 0), [1], r"spans\[0\]: expected a list of 2, not \[1\]"),
        (("members", 0, "Other", "seconds"), None, r"members\[0\]\.Other\.seconds: expected a number"),
        (("members", 0), {"Task": {}}, r"members\[0\]: expected one of Leaf, Other, not"),
        (("members", 0), {}, r"members\[0\]: expected one of Leaf, Other, not"),
        (("members",), 3, r"members: expected a list, not 3"),
        (("by_name", "a"), 1.5, r"by_name\['a'\]: expected an integer, not 1.5"),
        (("by_name",), [], r"by_name: expected an object"),
        (("by_edge", 0, 1), 1, r"by_edge\[0\]\[1\]: expected true or false, not 1"),
        (("task",), "fwd", r"task: 'fwd' is not a task"),
        (("maybe",), 1, r"maybe: 1 is of a type that does not belong here"),
        (("more",), 1, r"it has more; it may have members, spans, "),
    ],
)
def test_a_fault_is_named_by_its_place(place, wrong, message):
    data = json.loads(json.dumps(FORMAT.dump(Tree, TREE)))
    at = data
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = wrong
    with pytest.raises(ValueError, match=message):
        FORMAT.load(Tree, data)


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="it lacks by_edge, by_name, edges, maybe, spans, task"):
        FORMAT.load(Tree, {"members": []})
