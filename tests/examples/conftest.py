"""Examples are run in this process, as ``main`` of their module, or from the command line."""

import importlib
import pathlib

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports an example by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module
