"""The wheel has every file of the packages, and works where the source is not."""

import fnmatch
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from mpmd.version import __version__
from tests.support.scripts import module_at

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("mpmd", "cluster")
FILES = {
    str(path.relative_to(ROOT))
    for package in PACKAGES
    for path in (ROOT / package).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}

release_notes = module_at(ROOT / ".ci" / "release_notes.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_data_files_are_in_the_package_data(package):
    patterns = PROJECT["tool"]["setuptools"]["package-data"][package]
    data = [name.partition("/")[2] for name in FILES if name.startswith(f"{package}/") and name[-3:] != ".py"]
    assert "py.typed" in data
    assert not [name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_with_code_are_packages(package):
    folders = {Path(name).parent for name in FILES if name.startswith(f"{package}/") and name[-3:] == ".py"}
    assert not [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists()]


# Release notes.


CHANGELOG = """# Changes

## 0.3.0, not yet released

- New.

## 0.2.0, 2026-05-01

- One.
- Two.

## 0.1.0, 2026-01-01

- First.
"""


def test_release_notes_are_the_section_of_the_version():
    assert release_notes.notes("0.2.0", CHANGELOG) == "- One.\n- Two.\n"
    assert release_notes.notes("0.1.0", CHANGELOG) == "- First.\n"


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.3.0", "has no date: write '## 0.3.0, "), ("0.4.0", "no section '0.4.0', but 0.3.0")],
)
def test_a_version_that_is_not_released_has_no_notes(version, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        release_notes.notes(version, CHANGELOG)


def test_versions_of_all_files_are_compared():
    release_notes.check_version(__version__)
    with pytest.raises(ValueError, match=r"mpmd/version\.py has the version .* release is 9\.9"):
        release_notes.check_version("9.9")


# The files that are installed.


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, and the wheel that is made from it, of a copy of the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--outdir", out, source]
    subprocess.run(command, check=True, capture_output=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_the_wheel_has_the_files_of_the_packages(built):
    names = {name for name in zipfile.ZipFile(built[1]).namelist() if ".dist-info/" not in name}
    assert names == FILES


@pytest.mark.slow
def test_the_source_distribution_has_what_the_tests_need(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= FILES | {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"}
    assert {"tests/test_packaging.py", "docs/index.md", "examples/common.py"} <= names


STEP = """
import jax, jax.numpy as jnp, numpy as np, mpmd

def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params[0]) @ params[1] - x) ** 2)

def step(params, x):
    return mpmd.value_and_grad(loss, num_microbatches=2, schedule=mpmd.Std1F1B(2))(params, x)

mesh = mpmd.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
params, x = [jnp.eye(8), jnp.eye(8) / 2], jnp.ones((4, 8))
result, profile = None, mpmd.jit(step, mesh).profile(params, x)
profile.write_html("step.html")
print(mpmd.__file__, float(profile.result[0]), float(jax.jit(step)(params, x)[0]))
"""


@pytest.mark.slow
def test_the_wheel_works_without_the_source(built, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site"]
    subprocess.run([*install, built[1]], check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "site"),
        "JAX_NUM_CPU_DEVICES": "2",
    }

    def run(*arguments):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert f"{tmp_path / 'site' / 'mpmd'}" in run("-m", "mpmd", "doctor", "--no-ray")
    file, loss, expected = run("-c", STEP).split()
    assert file.startswith(str(tmp_path / "site")) and loss == expected
    assert "<html" in (tmp_path / "step.html").read_text()[:200]
