"""Runs benchmarks: ``python -m benchmarks NAME ...``, each in a process and with a Ray of its own.

Each benchmark sets things up side by side and measures them in turns; times are medians, and comparisons are
ratios within the same run. With ``--device`` the benchmarks run on the accelerator of this machine, in ten
minutes at most: each has a time limit, and one that hangs or crashes leaves the others.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.frame import Row, Setup
from benchmarks.host import Host, changed_environment
from benchmarks.peers import PEERS
from benchmarks.report import (
    Outcome,
    available_cores,
    document,
    machine_facts,
    machine_table,
    page,
    table,
    text_of,
)

BENCHMARKS: Mapping[str, str] = {
    "transport": "messages between processes, beside memory and TCP, encrypted or not",
    "overhead": "steps of tiny tasks, beside other ways to run them",
    "throughput": "compute-bound steps, beside other ways to run them and their bound",
    "planner": "searches; predicted steps and choices beside measured ones",
    "published": "predictions of step times that others have published",
    "compile": "seconds to compile train steps, beside jax.jit",
    "scale": "large plans, and the driver's time for a step",
    "startup": "seconds until the first step has run, with an empty and a full cache",
    "checkpoint": "saving and restoring, beside plain Orbax",
    "recovery": "snapshots and repeated steps, and the seconds of a recovery",
    "chaos": "training that goes on while processes are killed, bit for bit",
    "device": "bits, profile, memory and groups of several devices, as on an accelerator",
    "conformance": "programs of the tests on four groups that share a device",
}
"""The benchmarks in their order, each a module of this package."""

BY_DEFAULT = tuple(name for name in BENCHMARKS if name not in ("chaos", "device", "conformance"))
DEVICE_LIMITS = {
    "transport": 60.0,
    "throughput": 100.0,
    "recovery": 60.0,
    "device": 130.0,
    "conformance": 220.0,
}
"""The benchmarks that also run on accelerators, with the seconds after which each is ended."""

FIND_DEVICES = """
import json, jax
d = jax.devices()
gpu = "rocm" if "rocm" in d[0].client.platform_version.lower() else "cuda"
print(json.dumps([gpu if d[0].platform == "gpu" else d[0].platform, d[0].device_kind, len(d)]))
"""
"""Runs in a process that ends: while a process has the devices, no other process may be able to."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a benchmark failed or found something wrong."""
    args = parse_arguments(argv)
    setup = Setup(args, available_cores())
    if args.device:
        found = find_devices(args.platform, setup)
        if found is None:
            print("no accelerator: JAX finds only CPUs, so nothing was run; --platform cpu runs all on them")
            return 0
        setup = found
        args.json = args.json or default_path(setup, "json")
        args.page = args.page or default_path(setup, "md")
    machine = machine_facts()
    outcomes = []
    with environment_of_run():
        for name in args.names:
            outcomes.append(run_apart(name, setup))
            print(f"\n{outcomes[-1]}\n", flush=True)
    if missed := [row for outcome in outcomes for row in outcome.missed()]:
        print(table("Beyond their limits", missed) + "\n")
    print(machine_table(machine))
    write(args.json, json.dumps(document(setup, machine, outcomes), indent=1) + "\n")
    write(args.page, page(setup, machine, outcomes))
    return int(any(outcome.failure for outcome in outcomes))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    width = max(map(len, BENCHMARKS))
    names = "\n".join(f"  {name:{width}}  {text}" for name, text in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="benchmarks; by default all but chaos, device, conformance")
    add("--quick", action="store_true", help="the smallest cases, measured less")
    add("--json", type=pathlib.Path, metavar="FILE", help="a file for the results")
    add("--page", type=pathlib.Path, metavar="FILE", help="a Markdown file for the results")
    keys = [peer.key for peer in PEERS]
    add("--peers", nargs="+", choices=keys, default=keys, help="of overhead and throughput")
    add("--vtrain", type=pathlib.Path, metavar="PATH", help="a checkout of vTrain, for published")
    device = parser.add_argument_group("on an accelerator")
    device.add_argument("--device", action="store_true", help="run on the accelerator of this machine")
    device.add_argument("--platform", help="JAX's name; cpu tries the command out, with --quick")
    device.add_argument("--patience", type=float, default=1.0, help="factor of all time limits")
    chaos = parser.add_argument_group("chaos")
    chaos.add_argument("--kills", type=int, default=100)
    chaos.add_argument("--parts", choices=("together", "left-out"), help="train with a sampler")
    args = parser.parse_args(argv)
    if args.platform and not args.device:
        parser.error("--platform is for --device")
    known = DEVICE_LIMITS if args.device else BENCHMARKS
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no benchmark {', '.join(unknown)} here; there are {', '.join(known)}")
    args.names = args.names or list(DEVICE_LIMITS if args.device else BY_DEFAULT)
    return args


def find_devices(platform: str | None, setup: Setup) -> Setup | None:
    """The setup of this machine's accelerators; ``None`` if JAX finds CPUs only.

    Raises: ``RuntimeError`` with JAX's words when JAX cannot start.
    """
    if platform == "cpu":
        setup.options.quick = True
        return setup
    environment = {**os.environ, **({"JAX_PLATFORMS": platform} if platform else {})}
    command = [sys.executable, "-c", FIND_DEVICES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    if done.returncode:
        raise RuntimeError(f"JAX finds no devices:\n{done.stderr.strip()[-2000:]}")
    name, kind, devices = json.loads(done.stdout.strip().splitlines()[-1])
    return None if name == "cpu" else dataclasses.replace(setup, platform=name, kind=kind, devices=devices)


def default_path(setup: Setup, suffix: str) -> pathlib.Path:
    """The file of results of a device: its kind, the number of devices, and the date."""
    kind = re.sub(r"[^a-z0-9]+", "-", setup.kind.lower()).strip("-")
    folder = pathlib.Path("build/device" if setup.platform == "cpu" else "docs/device")
    return folder / f"{kind}-x{setup.devices}-{time.strftime('%Y-%m-%d')}.{suffix}"


def write(path: pathlib.Path | None, text: str) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path}")


@contextlib.contextmanager
def environment_of_run() -> Iterator[None]:
    """Has the processes of this run share compiled executables, and wait for Ray on busy machines."""
    with tempfile.TemporaryDirectory() as directory:
        variables = {
            "JAX_COMPILATION_CACHE_DIR": directory,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_worker_niceness": "0",  # as processes have that Ray does not start
        }
        with changed_environment(variables):
            yield


def run_apart(name: str, setup: Setup) -> Outcome:
    """Runs a benchmark in a process of its own, on a device within a time limit."""
    print(f"{name}:", file=sys.stderr, flush=True)
    limit = DEVICE_LIMITS[name] * setup.options.patience if setup.options.device else None
    environment = setup.environment(setup.devices, setup.cores)
    start = time.perf_counter()
    try:
        with Host("benchmarks.__main__:Runner", (setup,), environment, name, leads=True) as host:
            tables, failure = host.call("run", name, timeout=limit)
    except RuntimeError as error:
        tables, failure = {}, str(error)
    return Outcome(name, time.perf_counter() - start, tables, failure)


class Runner:
    """Runs a benchmark in its process, made by ``Host``."""

    def __init__(self, setup: Setup):
        self._setup = setup

    def run(self, name: str) -> tuple[dict[str, list[Row]], str]:
        """Returns the rows of each table, and the traceback if the benchmark failed after them."""
        tables: dict[str, list[Row]] = collections.defaultdict(list)
        try:
            for title, row in importlib.import_module(f"benchmarks.{name}").run(self._setup):
                tables[title].append(row)
                print(f"  {', '.join(map(text_of, row.values()))}", file=sys.stderr, flush=True)
        except Exception:  # the rows so far are results, too
            return dict(tables), traceback.format_exc()
        return dict(tables), ""

    def close(self) -> None:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
