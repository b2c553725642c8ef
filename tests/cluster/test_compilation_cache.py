"""The directory in which compiled executables are kept."""

import subprocess
import sys

import pytest

from cluster.devices import _faults_of

COMPILE = """
import sys, jax, jax.numpy as jnp
from cluster.devices import keep_compiled
keep_compiled(sys.argv[1])
jax.jit(lambda x: x * 2 + 1).lower(jnp.ones(3)).compile()
"""


def compiled_into(directory):
    """Compiles in a process of its own. Returns its stderr, and the entries by name."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(directory)], capture_output=True, text=True, check=True
    )
    return done.stderr, {path.name: path.read_bytes() for path in directory.glob("*-cache")}


def test_an_entry_that_cannot_be_read_is_written_again(tmp_path):
    _, entries = compiled_into(tmp_path)
    (name,) = [name for name in entries if "lambda" in name]
    (tmp_path / name).write_bytes(entries[name][: len(entries[name]) // 2])
    warned, repaired = compiled_into(tmp_path)
    assert "Error reading persistent compilation cache entry" in warned
    assert len(repaired[name]) > len(entries[name]) // 2
    warned, _ = compiled_into(tmp_path)
    assert "Error reading" not in warned


@pytest.mark.parametrize(
    ("mode", "is_safe"), [(0o700, True), (0o755, True), (0o775, False), (0o777, False), (0o1777, True)]
)
def test_a_directory_that_others_may_write_to(tmp_path, mode, is_safe):
    tmp_path.chmod(mode)
    faults = _faults_of(str(tmp_path))
    assert faults == () if is_safe else "others may write to the compilation cache" in faults[0]
    assert _faults_of(str(tmp_path / "none")) == ()
