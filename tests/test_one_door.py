"""``mpmd.launch``, ``mpmd.Recovery`` and ``mpmd.ClusterMesh`` are those of ``cluster``, loaded when used."""

import subprocess
import sys
from pathlib import Path

import pytest

import cluster
import mpmd

ROOT = Path(__file__).parents[1]


def run(program, *options, cwd=ROOT):
    """Runs a program; the project is where it would be installed."""
    search = f"import sys; sys.path.append({str(ROOT)!r})\n"
    return subprocess.run(
        [sys.executable, *options, "-c", search + program], cwd=cwd, capture_output=True, text=True
    )


def test_names_are_those_of_the_package():
    assert mpmd.launch is cluster.launch
    assert mpmd.Recovery is cluster.Recovery
    assert mpmd.ClusterMesh is cluster.ClusterMesh


def test_ray_is_loaded_when_a_name_is_used():
    done = run("import mpmd; before = 'ray' in sys.modules; mpmd.launch; print(before, 'ray' in sys.modules)")
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.usual("launch")
@pytest.mark.parametrize("name", ["launch", "Recovery", "ClusterMesh"])
def test_another_module_of_that_name_is_named_and_not_run(name, tmp_path):
    (tmp_path / "cluster.py").write_text("print('was imported')")
    done = run(f"import mpmd; mpmd.{name}", cwd=tmp_path)
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: Python finds {tmp_path / 'cluster.py'} where mpmd needs")
    assert error.endswith(
        f"its package 'cluster', which is in {ROOT / 'cluster'}: rename the file, and start Python again"
    )
    assert "was imported" not in done.stdout


def test_a_module_that_was_imported_before_is_named(tmp_path):
    (tmp_path / "cluster.py").write_text("")
    done = run("import cluster, mpmd; mpmd.launch", cwd=tmp_path)
    assert f"Python finds {tmp_path / 'cluster.py'}" in done.stderr.splitlines()[-1]


def test_a_folder_of_that_name_is_named(tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "__init__.py").write_text("")
    done = run("import mpmd; mpmd.launch", cwd=tmp_path)
    assert done.stderr.splitlines()[-1].endswith(
        f"rename the folder {tmp_path / 'cluster'}, and start Python again"
    )


def test_the_script_itself_may_have_that_name(tmp_path):
    script = tmp_path / "cluster.py"
    script.write_text(f"import sys; sys.path.append({str(ROOT)!r})\nprint('ran')\nimport mpmd\nmpmd.launch")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "ran\n"
    assert f"Python finds {script}" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_folder_without_python_files_does_no_harm(tmp_path):
    (tmp_path / "cluster").mkdir()
    done = run("import mpmd; print(mpmd.launch.__module__)", cwd=tmp_path)
    assert done.stdout == "cluster.launch\n", done.stderr
