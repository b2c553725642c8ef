"""The command ``mpmd plan``: plans a step, or chooses how a cluster is to run it, without devices."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mpmd.cli import choose
from mpmd.cli.arguments import ExitCode, add_command, add_output, count, number
from mpmd.render import chrome_trace, draw_timeline
from mpmd.render.chart import Chart

if TYPE_CHECKING:
    from mpmd.step.lowered_step import LoweredStep

EPILOG = """\
STEP and SHAPES are names in a module or a file, as package.module:name
or path/file.py:name.

STEP is a train step, or a result of mpmd.jit, which has a mesh of its
own. This mesh may be an mpmd.AbstractMpmdMesh. With a cluster, the
groups, stages, shardings, schedule and microbatches of the step are
chosen, as mpmd.plan does; without one, the step is planned as it is,
for --groups. SHAPES are the step's arguments, arrays or
jax.ShapeDtypeStructs: a tuple of them, or a function without arguments
that returns one; anything else is the only argument. Functions are
called for their shapes alone: nothing that they make is in memory.

examples:
  mpmd plan train.py:step --shapes train.py:shapes --groups 4
  mpmd plan my.package:step --shapes my.package:shapes -o step.svg
  mpmd plan train.py:step --shapes train.py:shapes --preset h100 --nodes 4
  mpmd plan train.py:step --shapes train.py:shapes --cluster c.json
"""


def add_commands(commands: Any) -> None:
    plan = add_command(commands, "plan", _plan, "plan a train step without devices, and report on it", EPILOG)
    plan.add_argument("step", metavar="STEP", help="the step, as module:name or file.py:name")
    plan.add_argument("--shapes", required=True, metavar="SHAPES", help="its arguments, in the same way")
    plan.add_argument("--groups", type=count, metavar="P", help="groups of devices to plan for")
    axes = "the devices of each group, by axis (default: one device)"
    plan.add_argument("--submesh", type=_axis, nargs="+", default=[], metavar="AXIS=SIZE", help=axes)
    speed = "the speed of a device, in operations per second (default: 1e12)"
    plan.add_argument("--speed", type=number, default=1e12, metavar="R", help=speed)
    choose.add_options(plan)
    formats = "the simulated step, as a picture (.svg, .png, .pdf) or a trace for Perfetto (.json); with a "
    formats += "cluster, that of the best candidate, or the table (.html, .json); can be repeated"
    add_output(plan, (".svg", ".png", ".pdf", *choose.TABLES), formats, action="append")


def _axis(argument: str) -> tuple[str, int]:
    name, equals, size = argument.partition("=")
    if not name.isidentifier() or not equals:
        raise argparse.ArgumentTypeError(f"{argument!r} is not an axis with its size, such as data=2")
    return name, count(size)


def _plan(options: argparse.Namespace) -> int:
    import jax

    with _importing_from(Path.cwd()):
        function, shapes = _named(options.step), _named(options.shapes)
        if callable(shapes):
            shapes = jax.eval_shape(shapes)
        if choose.is_wanted(options):
            choose.check_step(function, options.step)
            choose.choose(function, _arguments(function, shapes, options), options)
            return ExitCode.OK
        choose.check_unused(options)
        step = _step(function, options)
        lowered = step.lower(*_arguments(step, shapes, options))
    _report(lowered, options)
    return ExitCode.OK


def _report(lowered: LoweredStep, options: argparse.Namespace) -> None:
    from mpmd.step.planned_step import explain

    simulation = lowered.simulate(operations_per_second=options.speed)
    print(f"{lowered.report()}\n\n{explain(lowered)}\n")
    print(f"simulated, with tasks that take the time of their operations, {options.speed:.2g} per second and")
    print("device, which the devices of a group share evenly, and messages that take none:")
    print(Chart.of(simulation, of_plan=True).figures)
    for path in options.output or []:
        if path.suffix.lower() == ".json":
            chrome_trace(simulation, path)
        else:
            draw_timeline(simulation, path, f"{options.step}, simulated", of_plan=True)


def _arguments(step: Any, shapes: Any, options: argparse.Namespace) -> tuple:
    arguments = shapes if isinstance(shapes, tuple) else (shapes,)
    try:
        inspect.signature(step).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{options.step} cannot be called with what {options.shapes} gives, a tuple of {len(arguments)}: "
            f"{error}"
        ) from error
    return arguments


def _step(function: Any, options: argparse.Namespace) -> Any:
    from mpmd.meshes.abstract_mesh import AbstractMpmdMesh
    from mpmd.step.jit import MpmdFunction, jit

    if isinstance(function, MpmdFunction):
        if options.groups or options.submesh:
            raise ValueError(f"{options.step} has a mesh of its own: leave out --groups and --submesh")
        return function
    choose.check_callable(function, options.step)
    if not options.groups:
        raise ValueError(
            f"{options.step} has no mesh: say for how many groups to plan, with --groups, or for which "
            "cluster to choose, with --cluster"
        )
    return jit(function, AbstractMpmdMesh([dict(options.submesh)] * options.groups))


@contextlib.contextmanager
def _importing_from(directory: Path) -> Iterator[None]:
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))


def _named(text: str) -> Any:
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise ValueError(f"{text!r} is not the name of something in a module or a file: write module:name")
    value: Any = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    for part in name.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{where} has no {name!r}")
        value = getattr(value, part)
    return value


def _from_file(path: Path) -> ModuleType:
    """Imports the module in a file, which finds the modules beside it, as a script does."""
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    name = path.stem if known is None else str(path)  # a module of this name may be another one
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _importing_from(path.parent):
        spec.loader.exec_module(module)
    return module
