"""Programs that tests start: they compile as tests do, and have neither their fake devices nor their Ray."""

import os
import subprocess
import sys
import textwrap


def environment(**more: str) -> dict[str, str]:
    of_tests = ("RAY_ADDRESS", "JAX_NUM_CPU_DEVICES")
    return {name: value for name, value in os.environ.items() if name not in of_tests} | more


def run_python(*arguments: str, seconds: float, **variables: str) -> tuple[str, str]:
    """Runs Python with these arguments, finding what the tests find. Returns its stdout and stderr."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), **variables),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def run_code(code: str, seconds: float = 120, **variables: str) -> tuple[str, str]:
    """Runs a program that is a text within a test."""
    return run_python("-c", textwrap.dedent(code), seconds=seconds, **variables)
