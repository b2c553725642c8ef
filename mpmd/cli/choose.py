"""The part of ``mpmd plan`` that chooses how a cluster runs a step."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpmd.cli.arguments import count, number
from mpmd.cli.progress import progress_lines
from mpmd.language.remat import Remat
from mpmd.memory import Holding
from mpmd.planner.cluster import Cluster, HeterogeneousCluster
from mpmd.planner.cluster_file import read_file
from mpmd.planner.curves import Curve
from mpmd.planner.hardware import has_default
from mpmd.planner.presets import PRESETS
from mpmd.render import draw_timeline
from mpmd.schedules.families import ALL_FAMILIES
from mpmd.simulate import Link

_NUMBERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "nodes": (count, "how many nodes the cluster has"),
    "devices_per_node": (count, "how many devices a node has"),
    "memory": (number, "bytes that a device has for a step, such as 80e9"),
    "flops": (number, "operations per second of a device in matrix products, such as 4e14"),
    "memory_bandwidth": (number, "bytes per second that a device reads or writes of its memory"),
    "task_overhead": (number, "seconds that a task takes beside its computation (default: 0)"),
    "alone": (number, "how many times faster a device is while the others of its node wait (default: 1)"),
    "kernel_floor": (number, "seconds from the start of a small kernel to that of the next (default: 0)"),
    "collective_floor": (number, "seconds of an exchange beside those of its messages (default: 0)"),
    "holding": (str, f"where messages are until they are used: {', '.join(Holding)}"),
    "kind": (str, "the name of the devices, as Ray names accelerator types"),
}
_FLAGS = {
    "merges_all_reduces": "all-reduces whose results are added are one",
    "overlaps_gathers": "weights are gathered while devices compute",
    "accumulates_products": "products add to accumulators themselves",
    "flash_attention": "jax.nn.dot_product_attention is a kernel",
}
_LINKS = {
    "device_link": "between devices of a node: seconds, and bytes per second of a device",
    "node_link": "between nodes: seconds, and bytes per second that the devices of a node share",
}
_FIELDS = (*_NUMBERS, *_FLAGS, *_LINKS)
_EFFORT = ("memory_margin", "simulate", "seconds")
_FIXES = ("num_stages", "schedule", "num_microbatches", "remat", "fsdp", "sequence_parallel")
TABLES = (".html", ".json")
"""The extensions of files that get the table."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe a cluster, and options that fix choices, such as ``--num-stages``."""
    of_cluster = parser.add_argument_group(
        "a cluster, for which all is chosen that is not fixed", "in a file, or one by one"
    )
    file = "a JSON file with the fields of mpmd.Cluster; options take precedence"
    of_cluster.add_argument("--cluster", type=Path, metavar="FILE", help=file)
    preset = "the numbers of a known device; other options take precedence: "
    of_cluster.add_argument("--preset", choices=PRESETS, metavar="NAME", help=preset + ", ".join(PRESETS))
    for name, (parse, text) in _NUMBERS.items():
        of_cluster.add_argument(_option(name), type=parse, metavar="N", help=text)
    for name, text in _LINKS.items():
        of_cluster.add_argument(_option(name), type=number, nargs=2, metavar=("S", "B"), help=text)
    for name, text in _FLAGS.items():
        of_cluster.add_argument(_option(name), action=argparse.BooleanOptionalAction, help=text)
    rate = "operations per second of large products, and operations of one with half of that rate: "
    rate += '"product bfloat16" 2.3e14 2.3e10; can be repeated'
    of_cluster.add_argument(
        "--rate", nargs=3, action="append", default=[], metavar=("NAME", "RATE", "HALF"), help=rate
    )
    fixed = parser.add_argument_group("constraints, beside --groups and --submesh")
    fixed.add_argument("--num-stages", type=count, metavar="S", help="stages of all groups")
    fixed.add_argument("--schedule", metavar="NAME", help=", ".join(ALL_FAMILIES))
    fixed.add_argument("--num-microbatches", type=count, metavar="M", help="of a step")
    flags = {
        "remat": "compute layers again in the backward",
        "fsdp": "divide weights, too",
        "sequence_parallel": "divide values between tensor-parallel regions, too",
    }
    for name, text in flags.items():
        fixed.add_argument(_option(name), action=argparse.BooleanOptionalAction, help=text)
    policy = f"what layers keep, for all stages or for each: {', '.join(Remat)}"
    fixed.add_argument("--remat-policy", nargs="+", choices=[*Remat], metavar="POLICY", help=policy)
    margin = "the share of a device's memory that stays free (default: 0.08)"
    fixed.add_argument("--memory-margin", type=float, metavar="SHARE", help=margin)
    simulate = "plan and simulate the best K candidates (default: 32)"
    fixed.add_argument("--simulate", type=count, metavar="K", help=simulate)
    seconds = "plan no further candidate after so many seconds"
    fixed.add_argument("--seconds", type=number, metavar="T", help=seconds)
    measure = "run the tasks of the best K candidates, on this machine's devices"
    fixed.add_argument("--measure", type=int, default=0, metavar="K", help=measure)


def _number_of(text: str) -> float:
    try:
        return number(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--rate: {error}") from error


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def is_wanted(options: argparse.Namespace) -> bool:
    names = ("cluster", "preset", *_FIELDS)
    return bool(options.rate) or any(getattr(options, name) is not None for name in names)


def check_unused(options: argparse.Namespace) -> None:
    """Raises ``ValueError`` for options that mean nothing without a cluster."""
    names = (*_FIXES, "remat_policy", *_EFFORT)
    useless = [_option(name) for name in names if getattr(options, name) is not None]
    useless += ["--measure"] if options.measure else []
    useless += [f"-o {path}" for path in options.output or [] if path.suffix.lower() == ".html"]
    if useless:
        raise ValueError(
            f"{', '.join(useless)}: there is nothing to choose without a cluster, --cluster FILE, "
            f"--preset NAME or {', '.join(map(_option, _FIELDS))}"
        )


def check_step(step: Any, name: str) -> None:
    """Raises ``ValueError`` for a step that has a mesh, and for an object that is no function."""
    from mpmd.step.jit import MpmdFunction

    if isinstance(step, MpmdFunction):
        raise ValueError(f"{name} has a mesh of its own: name the train step itself")
    check_callable(step, name)


def check_callable(step: Any, name: str) -> None:
    if not callable(step):
        raise ValueError(f"{name} is of type {type(step).__name__}, and not a step")


def choose(step: Any, arguments: tuple, options: argparse.Namespace) -> None:
    from mpmd.planner.choose import plan

    fixes = {name: getattr(options, name) for name in (*_FIXES, "groups")}
    if options.remat_policy:
        if options.remat is not None:
            raise ValueError("--remat-policy says what --remat and --no-remat say: give one of them")
        policies = options.remat_policy
        fixes["remat"] = policies if len(policies) > 1 else policies[0]
    effort = {name: value for name in _EFFORT if (value := getattr(options, name)) is not None}
    cluster = _cluster(options)
    with progress_lines():
        choice = plan(
            step,
            *arguments,
            cluster=cluster,
            submesh=dict(options.submesh) or None,
            measure=options.measure,
            **fixes,
            **effort,
        )
    print(choice)
    for path in options.output or []:
        suffix = path.suffix.lower()
        if suffix in TABLES:
            path.write_text(choice.to_html() if suffix == ".html" else choice.to_json(), encoding="utf-8")
        else:
            draw_timeline(choice.simulation, path, f"{options.step}, simulated", of_plan=True)


def _cluster(options: argparse.Namespace) -> Cluster | HeterogeneousCluster:
    """Builds the cluster of the file and options. Raises ``ValueError`` for missing and unknown fields."""
    if options.cluster is not None and options.preset is not None:
        raise ValueError("--cluster and --preset both describe the cluster: give one of them")
    fields = read_file(options.cluster) if options.cluster is not None else {}
    if options.preset is not None:
        fields = {"nodes": 1, **PRESETS[options.preset].fields()}
    plain = (*_NUMBERS, *_FLAGS)
    others = {name: value for name in plain if (value := getattr(options, name)) is not None}
    others |= {name: Link(*value) for name in _LINKS if (value := getattr(options, name)) is not None}
    if options.rate:
        curves = {name: Curve(_number_of(rate), _number_of(half)) for name, rate, half in options.rate}
        others["rates"] = {**fields.get("rates", {}), **curves}
    has_pools = "pools" in fields
    if has_pools and others:
        names = ", ".join(map(_option, others))
        raise ValueError(f"{names}: {options.cluster} has a cluster of several kinds of devices")
    fields |= others
    needed = [field.name for field in dataclasses.fields(Cluster) if not has_default(field)]
    if not has_pools and (missing := [_option(name) for name in needed if name not in fields]):
        raise ValueError(f"the cluster is not known without {', '.join(missing)}")
    try:
        return Cluster.load(options.cluster) if has_pools else Cluster(**fields)
    except TypeError as error:  # of values in the file, which is as wrong as the command line
        raise ValueError(str(error)) from error
