"""The directory in which compiled executables are kept."""

import os
import re
import stat
import subprocess
import sys

import pytest

import cluster
from cluster.process.compilation_cache import check_cache
from mpmd.util import private_directory
from mpmd.util.private_directory import fault_of, make_private

COMPILE = """
import sys, jax, jax.numpy as jnp
from cluster.process.compilation_cache import keep_compiled
keep_compiled(sys.argv[1])
jax.jit(lambda x: x * 2 + 1).lower(jnp.ones(3)).compile()
"""


def compiled_into(directory):
    """Compiles in a process of its own. Returns its stderr, and the entries by name."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(directory)], capture_output=True, text=True, check=True
    )
    return done.stderr, {path.name: path.read_bytes() for path in directory.glob("*-cache")}


@pytest.mark.slow
def test_an_entry_that_cannot_be_read_is_written_again(tmp_path):
    _, entries = compiled_into(tmp_path)
    (name,) = [name for name in entries if "lambda" in name]
    (tmp_path / name).write_bytes(entries[name][: len(entries[name]) // 2])
    warned, repaired = compiled_into(tmp_path)
    assert "Error reading persistent compilation cache entry" in warned
    assert len(repaired[name]) > len(entries[name]) // 2
    warned, _ = compiled_into(tmp_path)
    assert "Error reading" not in warned


def test_a_directory_that_does_not_exist_is_made_for_its_user_alone(tmp_path):
    make_private(str(tmp_path / "above" / "cache"))
    assert stat.S_IMODE((tmp_path / "above" / "cache").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("mode", "is_safe"), [(0o700, True), (0o755, True), (0o775, False), (0o777, False), (0o1777, False)]
)
def test_a_directory_that_others_may_write_to_is_refused(tmp_path, mode, is_safe):
    tmp_path.chmod(mode)
    assert fault_of(str(tmp_path / "none")) is None
    if is_safe:
        check_cache(tmp_path, {})
        return
    with pytest.raises(
        ValueError, match=f"others may write to {tmp_path} of the user .*{mode:04o}"
    ) as caught:
        check_cache("unused", {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)})
    assert f"chmod -R go-rwx {tmp_path}" in str(caught.value)
    with pytest.raises(ValueError, match="processes execute what is in it"):
        cluster.launch({"stage": 1}, "stage", compilation_cache=tmp_path)  # before there is a Ray
    subprocess.run(re.search(r"`(.*?)`", str(caught.value))[1], shell=True, check=True)
    (tmp_path / "entry").touch()
    (tmp_path / "entry").chmod(0o664)  # as by a run with the umask 002
    check_cache(tmp_path, {})


@pytest.fixture
def as_another_user(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(private_directory, "_ROOT", 54322)


def test_a_directory_of_another_user_is_refused(tmp_path, as_another_user):
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=f"{tmp_path} belongs to the user .*mode 0755.* another directory"):
        check_cache(tmp_path, {})


@pytest.mark.parametrize(("mode", "is_safe"), [(0o755, False), (0o700, True)])
def test_files_that_others_may_write_where_others_enter(tmp_path, mode, is_safe):
    tmp_path.chmod(mode)
    (tmp_path / "entry").touch()
    (tmp_path / "entry").chmod(0o664)
    fault = fault_of(str(tmp_path))
    assert fault is None if is_safe else f"others may have written {tmp_path}/entry" in fault


@pytest.mark.slow
@pytest.mark.parametrize("variable", [{}, {"JAX_COMPILATION_CACHE_DIR": "{}"}])
def test_an_actor_refuses_it_too(tmp_path, variable):
    """Also where it is not ``launch`` that names it."""
    tmp_path.chmod(0o777)
    given = {name: text.format(tmp_path) for name, text in variable.items()}
    script = COMPILE.replace("sys.argv[1]", "None") if variable else COMPILE
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=os.environ | given
    )
    assert "RuntimeError: the compilation cache is refused, because your processes execute" in ran.stderr
    assert not list(tmp_path.iterdir())
