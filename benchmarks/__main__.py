"""Runs the benchmarks: ``python -m benchmarks [suite ...]``.

Every suite sets things up side by side and measures them in turns; times are medians, and comparisons are
ratios within the same run. What the machine is, and what it does besides, is part of the results.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

from benchmarks.measure import Conditions, Effort, Result, Table, Target, machine_facts
from benchmarks.peers import PEERS
from benchmarks.workload import available_cores

SUITES = (
    "transport",
    "reshard",
    "processes",
    "overhead",
    "throughput",
    "partial_sums",
    "global_mesh",
    "sleeping",
    "slices",
    "prediction",
    "choices",
    "published",
    "scale",
    "startup",
    "checkpoint",
    "recovery",
    "corruption",
    "replay",
)
EFFORT, QUICK_EFFORT = Effort(repetitions=5, seconds=0.4), Effort(repetitions=3, seconds=0.3)
OBJECT_STORE_BYTES = 2**30
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


def main() -> None:
    args = parse_arguments()
    facts = machine_facts()
    results = run_suites(args)
    targets = [target for result in results.values() for target in result.targets]
    machine = str(Table("Machine", ("", "value"), tuple(facts.items())))
    print(f"{Target.table(targets)}\n\n{machine}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document(facts, results), indent=1) + "\n")
    if args.into:
        insert("\n\n".join([*map(str, results.values()), machine]), args.into)


def parse_arguments() -> argparse.Namespace:
    keys = [peer.key for peer in PEERS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[1])
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="the smallest cases, measured less")
    parser.add_argument("--peers", nargs="+", choices=keys, default=keys)
    parser.add_argument("--repetitions", type=int, help="how often everything is measured")
    parser.add_argument("--seconds", type=float, help="of each measurement, roughly")
    parser.add_argument("--vtrain", type=pathlib.Path, help="a checkout of vTrain, for published")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the results")
    parser.add_argument("--into", type=pathlib.Path, help="a Markdown file whose results to replace")
    args = parser.parse_args()
    if unknown := sorted(set(args.suites) - set(SUITES)):
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}")
    return args


def run_suites(args: argparse.Namespace) -> dict[str, Result]:
    """One Ray for all of them, with as many CPUs as there are cores."""
    usual = QUICK_EFFORT if args.quick else EFFORT
    effort = Effort(args.repetitions or usual.repetitions, args.seconds or usual.seconds)
    for peer in PEERS:
        if peer.missing and peer.key in args.peers:
            print(f"skips {peer.name}: {peer.needs} is not installed; pip install '.[bench]'")
    cores = available_cores()
    with compilation_cache(), local_ray(cores) as address:
        conditions = Conditions(cores, address, args.peers, effort, args.quick, args.vtrain)
        return {name: run_suite(name, conditions) for name in args.suites or SUITES}


@contextlib.contextmanager
def compilation_cache() -> Iterator[None]:
    """Has the processes that are started keep what they compile: several peers run the same executables."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = directory
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        yield


@contextlib.contextmanager
def local_ray(cores: int) -> Iterator[str]:
    """The address of a Ray of its own."""
    started: Any = ray.init(
        address="local",
        num_cpus=cores,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
    )
    try:
        yield started.address_info["gcs_address"]
    finally:
        ray.shutdown()


def run_suite(name: str, conditions: Conditions) -> Result:
    print(f"{name}:", file=sys.stderr, flush=True)
    result = importlib.import_module(f"benchmarks.{name}").run(conditions)
    print(f"\n{result}\n", flush=True)
    return result


def document(facts: Mapping[str, str], results: Mapping[str, Result]) -> dict:
    """All results as plain JSON values."""
    targets: Sequence[Target] = [target for result in results.values() for target in result.targets]
    return {
        "machine": facts,
        **{name: result.data for name, result in results.items()},
        "targets": [target.data() for target in targets],
    }


def insert(text: str, path: pathlib.Path) -> None:
    """Replaces what is between the marks in a file."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{path} has no lines {BEGIN!r} and {END!r}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
