"""Programs of the tests on four groups that share a device; each computes what ``jax.jit`` computes."""

from __future__ import annotations

import time
from typing import Any

import jax

from benchmarks.__main__ import DEVICE_LIMITS
from benchmarks.frame import Rows, Setup
from tests.support.covering import COVERING
from tests.support.parity import assert_case_on
from tests.support.programs import PROGRAMS
from tests.support.programs.table import Case

GROUPS = 4
RESERVE_SECONDS = 40.0
"""Seconds before the limit from which on no program begins, because the last one has to end, too."""

COMPILE_QUICKLY = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
"""The sizes of the programs are tiny."""


def run(setup: Setup) -> Rows:
    """Runs once each program that fits these groups; on a device, as many as there is time for."""
    # By default GPUs round operands of products to fewer bits than float32 has; tolerances are for float32.
    jax.config.update("jax_default_matmul_precision", "highest")
    limit = DEVICE_LIMITS["conformance"] * setup.options.patience - RESERVE_SECONDS
    end = time.perf_counter() + limit if setup.options.device else float("inf")
    environment = {"env_vars": COMPILE_QUICKLY if setup.has_gpus else {}}
    by_name = {program.name: program for program in PROGRAMS}
    failures = []
    with setup.launch({"stage": GROUPS}, "stage", cpus_per_group=0.5, runtime_env=environment) as mesh:
        for name in COVERING:
            case = by_name[name].case()
            if case.axes or case.groups > GROUPS:
                continue
            failure = failure_of(case, mesh) if time.perf_counter() < end else "not begun"
            failures += [name] if failure not in ("", "not begun") else []
            yield "Programs on groups that share a device", {"": name, "failure": failure}
    if failures:
        raise RuntimeError(f"compute something else than jax.jit: {', '.join(failures)}")


def failure_of(case: Case, mesh: Any) -> str:
    """The fault of a program on these groups; empty if it computes what ``jax.jit`` computes."""
    try:
        assert_case_on(mesh, case, donate_argnums=0)
    except Exception as error:  # whatever it is, it is the result of this benchmark
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' '.join(lines[:6])}"[:400]
    return ""
