"""The memory that a process takes for a step is what the report says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux forgets a process's peak")
def test_a_process_takes_what_the_report_says():
    """In a process of its own, whose malloc gives back what is freed."""
    variables = {"MALLOC_MMAP_THRESHOLD_": "1000000", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.runtime.large_model"]
    found = subprocess.run(command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, check=True)
    cases = json.loads(found.stdout)
    for name, (planned, taken) in cases.items():
        assert abs(taken - planned) < 0.1 * planned, f"{name}: {planned} bytes planned, {taken} taken"
    assert cases["InterleavedGPipe"][0] > 1.5 * cases["Interleaved1F1B"][0]
