"""Every public function refuses arguments of wrong types by their names, before it starts anything."""

import contextlib
import importlib
import inspect
import re

import pytest

import cluster
import mpmd
from mpmd.checkpoint import files
from mpmd.explanation import Explanation
from mpmd.step.jit import MpmdFunction
from mpmd.step.loaded_step import LoadedStep
from mpmd.step.lowered_step import LoweredStep
from tests.support.public_functions import public_functions
from tests.support.wrong_arguments import VALUES, Public

PUBLIC = {public.name: public for public in public_functions()}

NO_FUNCTIONS = {"Add", "Max", "Mean", "MessageBytes", "Op", "Remat", "Schedule", "__version__", "handler"}
"""Objects, a type, an enumeration, the interfaces that others write, and what takes nothing."""

RESULTS = {"Choice", "ClusterMesh", "Gap", "MpmdArray", "Profile", "Simulation"}
"""Made by other functions; the methods of an ``MpmdArray`` are those of ``jax.Array``."""

CLASSES = (
    mpmd.Choice,
    mpmd.Cluster,
    mpmd.CustomSchedule,
    mpmd.MpmdMesh,
    mpmd.Profile,
    mpmd.TaskTimes,
    cluster.ClusterMesh,
    LoadedStep,
    LoweredStep,
    MpmdFunction,
    Explanation,
    mpmd.simulate.Simulation,
)
OF_THE_PACKAGE = {
    "Cluster.pool",
    "Cluster.with_memory",
    "Cluster.with_nodes",
    "CustomSchedule.of_size",
    "LoadedStep.submit",
    "Simulation.of",
}
"""Methods that other modules call, and one that always raises."""


OF_NOTHING = {
    "Choice.jit",
    "Choice.mesh",
    "Choice.stage_profile",
    "ClusterMesh.find_nan",
    "Cluster.load",
    "ClusterMesh.replace",
    "ClusterMesh.resize",
    "CustomSchedule.from_file",
    "Profile.load",
    "Profile.write_html",
    "collective_seconds",
    "grad",
    "replay.load",
}
"""Those of which the table has no valid arguments: they need what nothing is started for."""


class Started(Exception):
    """Something was started."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def start(*args, **kwargs):
        raise Started

    for module, name in (
        ("cluster.launch", "connect_to_ray"),
        ("cluster.describe", "connect_to_ray"),
        ("mpmd.planner.choose", "Trials"),
        ("mpmd.planner.local_devices", "measured"),
    ):
        monkeypatch.setattr(importlib.import_module(module), name, start)
    for name in ("Checkpointer", "AsyncCheckpointer"):
        monkeypatch.setattr(files.orbax, name, start)


def public_names():
    for module in (mpmd, mpmd.checkpoint, mpmd.render, mpmd.simulate, cluster):
        for name in module.__all__:
            value = getattr(module, name)
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if not is_error and not inspect.ismodule(value):
                yield name


def methods():
    """The public methods of these classes that have parameters with names."""
    for owner in CLASSES:
        for name, method in inspect.getmembers(owner, callable):
            if not name.startswith("_"):
                parameters = list(inspect.signature(method).parameters.values())
                if any(parameter.name != "self" and parameter.kind in NAMED for parameter in parameters):
                    yield f"{owner.__name__}.{name}"


NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def test_every_public_function_is_in_the_table():
    assert set(public_names()) - {*PUBLIC} == NO_FUNCTIONS | RESULTS


def test_every_public_method_is_in_the_table():
    assert set(methods()) - {*PUBLIC} == OF_THE_PACKAGE


def test_valid_arguments_are_accepted(monkeypatch, tmp_path):
    for name in PUBLIC.keys() - OF_NOTHING:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)  # some of them write files
        with contextlib.suppress(Started):
            PUBLIC[name].call()


def test_a_wrong_argument_is_refused_by_its_name():
    faults = [
        fault
        for public in PUBLIC.values()
        for parameter, value in public.refused()
        if (fault := fault_of(public, parameter, value))
    ]
    assert not faults, "\n" + "\n".join(faults)


def fault_of(public: Public, parameter: str, value: str) -> str | None:
    """What is wrong with how a function refuses a value."""
    call = f"{public.name}({parameter}={VALUES[value]!r})"
    try:
        public.call(**{parameter: VALUES[value]})
    except (TypeError, ValueError) as error:
        named = re.search(rf"(?<!\w){parameter}(?!\w)", str(error))
        return None if named else f"{call}: {type(error).__name__}: {error}"
    except Exception as error:
        return f"{call}: {type(error).__name__}: {error}"
    return f"{call} is accepted"
