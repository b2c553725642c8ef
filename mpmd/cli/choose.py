"""The part of ``mpmd plan`` that chooses how a cluster runs a step."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpmd.cli.arguments import count, number
from mpmd.cli.progress import progress_lines
from mpmd.language.remat import Remat
from mpmd.memory import Holding
from mpmd.planner.cluster import Cluster, HeterogeneousCluster
from mpmd.planner.cluster_file import read_fields
from mpmd.planner.curves import Curve
from mpmd.planner.hardware import has_default
from mpmd.planner.presets import PRESETS
from mpmd.render import draw_timeline
from mpmd.schedules.families import ALL_FAMILIES
from mpmd.simulate import Link

_COUNT = {"type": count, "metavar": "N"}
_NUMBER = {"type": number, "metavar": "N"}
_LINK = {"type": number, "nargs": 2, "metavar": ("S", "B")}
_FLAG = {"action": argparse.BooleanOptionalAction}
_OF_CLUSTER: dict[str, tuple[dict[str, Any], str]] = {
    "nodes": (_COUNT, "how many nodes the cluster has"),
    "devices_per_node": (_COUNT, "how many devices a node has"),
    "memory": (_NUMBER, "bytes that a device has for a step, such as 80e9"),
    "flops": (_NUMBER, "operations per second of a device in matrix products, such as 4e14"),
    "memory_bandwidth": (_NUMBER, "bytes per second that a device reads or writes of its memory"),
    "task_overhead": (_NUMBER, "seconds that a task takes beside its computation (default: 0)"),
    "alone": (_NUMBER, "how many times faster a device is while the others of its node wait (default: 1)"),
    "kernel_floor": (_NUMBER, "seconds from the start of a small kernel to that of the next (default: 0)"),
    "collective_floor": (_NUMBER, "seconds of an exchange beside those of its messages (default: 0)"),
    "holding": ({"metavar": "N"}, f"where messages are until they are used: {', '.join(Holding)}"),
    "kind": ({"metavar": "N"}, "the name of the devices, as Ray names accelerator types"),
    "device_link": (_LINK, "between devices of a node: seconds, and bytes per second of a device"),
    "node_link": (_LINK, "between nodes: seconds, and bytes per second that the devices of a node share"),
    "merges_all_reduces": (_FLAG, "all-reduces whose results are added are one"),
    "overlaps_gathers": (_FLAG, "weights are gathered while devices compute"),
    "accumulates_products": (_FLAG, "products add to accumulators themselves"),
    "flash_attention": (_FLAG, "jax.nn.dot_product_attention is a kernel"),
}
_OF_PLAN: dict[str, tuple[dict[str, Any], str]] = {
    "num_stages": ({"type": count, "metavar": "S"}, "stages of all groups"),
    "schedule": ({"metavar": "NAME"}, ", ".join(ALL_FAMILIES)),
    "num_microbatches": ({"type": count, "metavar": "M"}, "of a step"),
    "remat": (_FLAG, "compute layers again in the backward"),
    "fsdp": (_FLAG, "divide weights, too"),
    "sequence_parallel": (_FLAG, "divide values between tensor-parallel regions, too"),
    "remat_policy": (
        {"nargs": "+", "choices": [*Remat], "metavar": "POLICY"},
        f"what layers keep, for all stages or for each: {', '.join(Remat)}",
    ),
    "memory_margin": (
        {"type": float, "metavar": "SHARE"},
        "the share of a device's memory that stays free (default: 0.08)",
    ),
    "simulate": (
        {"type": count, "metavar": "K"},
        "plan and simulate K candidates (default: those that may win, at most 5)",
    ),
    "seconds": (
        {"type": number, "metavar": "T"},
        "plan no further candidate after so many seconds if one fits",
    ),
    "measure": (
        {"type": int, "metavar": "K"},
        "run the tasks of the best K candidates, on this machine's devices",
    ),
}
"""Options that are arguments of ``mpmd.plan``, and ``remat_policy``, which is the argument ``remat``."""
TABLES = (".html", ".json")
"""The extensions of files that get the table."""


def add_options(parser: argparse.ArgumentParser) -> None:
    of_cluster = parser.add_argument_group(
        "a cluster, for which all is chosen that is not fixed", "in a file, or one by one"
    )
    file = "a JSON file with the fields of mpmd.Cluster; options take precedence"
    of_cluster.add_argument("--cluster", type=Path, metavar="FILE", help=file)
    preset = "the numbers of a known device; other options take precedence: "
    of_cluster.add_argument("--preset", choices=PRESETS, metavar="NAME", help=preset + ", ".join(PRESETS))
    rate = "operations per second of large products, and operations of one with half of that rate: "
    rate += '"product bfloat16" 2.3e14 2.3e10; can be repeated'
    of_plan = parser.add_argument_group("constraints, beside --groups and --submesh")
    for group, table in ((of_cluster, _OF_CLUSTER), (of_plan, _OF_PLAN)):
        for name, (settings, text) in table.items():
            group.add_argument(_option(name), help=text, **settings)
    of_cluster.add_argument(
        "--rate", nargs=3, action="append", default=[], metavar=("NAME", "RATE", "HALF"), help=rate
    )


def _passed_options(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _number_of(text: str) -> float:
    try:
        return number(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--rate: {error}") from error


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def is_wanted(options: argparse.Namespace) -> bool:
    return bool(options.rate or _passed_options(options, ("cluster", "preset", *_OF_CLUSTER)))


def check_unused(options: argparse.Namespace) -> None:
    useless = [*map(_option, _passed_options(options, _OF_PLAN))]
    useless += [f"-o {path}" for path in options.output or [] if path.suffix.lower() == ".html"]
    if useless:
        raise ValueError(
            f"{', '.join(useless)}: there is nothing to choose without a cluster, --cluster FILE, "
            f"--preset NAME or {', '.join(map(_option, _OF_CLUSTER))}"
        )


def check_step(step: Any, name: str) -> None:
    from mpmd.step.jit import MpmdFunction

    if isinstance(step, MpmdFunction):
        raise ValueError(f"{name} has a mesh of its own: name the train step itself")
    check_callable(step, name)


def check_callable(step: Any, name: str) -> None:
    if not callable(step):
        raise ValueError(f"{name} is of type {type(step).__name__}, and not a step")


def choose(step: Any, arguments: tuple, options: argparse.Namespace) -> None:
    from mpmd.planner.choose import plan

    arguments_of_plan = _passed_options(options, (*_OF_PLAN, "groups"))
    if policies := arguments_of_plan.pop("remat_policy", None):
        if options.remat is not None:
            raise ValueError("--remat-policy says what --remat and --no-remat say: give one of them")
        arguments_of_plan["remat"] = policies if len(policies) > 1 else policies[0]
    cluster, submesh = _cluster(options), dict(options.submesh) or None
    with progress_lines():
        choice = plan(step, *arguments, cluster=cluster, submesh=submesh, **arguments_of_plan)
    print(choice)
    for path in options.output or []:
        suffix = path.suffix.lower()
        if suffix in TABLES:
            path.write_text(choice.to_html() if suffix == ".html" else choice.to_json(), encoding="utf-8")
        else:
            draw_timeline(choice.simulation, path, f"{options.step}, simulated", of_plan=True)


def _cluster(options: argparse.Namespace) -> Cluster | HeterogeneousCluster:
    if options.cluster is not None and options.preset is not None:
        raise ValueError("--cluster and --preset both describe the cluster: give one of them")
    fields = read_fields(options.cluster) if options.cluster is not None else {}
    if options.preset is not None:
        fields = {"nodes": 1, **PRESETS[options.preset]}
    given = _passed_options(options, _OF_CLUSTER)
    given |= {name: Link(*given[name]) for name in ("device_link", "node_link") if name in given}
    if options.rate:
        curves = {name: Curve(_number_of(rate), _number_of(half)) for name, rate, half in options.rate}
        given["rates"] = {**fields.get("rates", {}), **curves}
    if "pools" in fields:
        if given:
            names = ", ".join(map(_option, given))
            raise ValueError(f"{names}: {options.cluster} has a cluster of several kinds of devices")
        return Cluster.load(options.cluster)
    fields |= given
    needed = [field.name for field in dataclasses.fields(Cluster) if not has_default(field)]
    if missing := [_option(name) for name in needed if name not in fields]:
        raise ValueError(f"the cluster is not known without {', '.join(missing)}")
    return Cluster(**fields)
