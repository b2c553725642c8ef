"""All steps that are typed in; nothing is copied from code."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.facts import Fact
from benchmarks.published.gpus import steps_of_gpus
from benchmarks.published.tpus import steps_of_tpus


def typed_in() -> Iterator[Fact]:
    """The facts of papers and pages."""
    yield from steps_of_gpus()
    yield from steps_of_tpus()
