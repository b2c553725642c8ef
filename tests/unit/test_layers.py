"""The rules of the architecture that imports can break."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSES = {"trace", "split", "place", "specs", "lower", "liveness", "verify"}
PARTS = set(
    "accumulate assign backward conds cost executables feedback fit fuse graph jaxpr marks meshes "
    "replicate residuals".split()
)
WITHOUT_JAX = set(
    "cli compare errors explanation holdings ir liveness progress report text timeline verify".split()
)


def imports(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(node.module)
    return found


def tops(path):
    return {name.split(".")[0] for name in imports(path)}


MPMD = sorted((ROOT / "mpmd").rglob("*.py"))
CLUSTER = sorted((ROOT / "cluster").rglob("*.py"))


@pytest.mark.parametrize("path", MPMD, ids=lambda p: str(p.relative_to(ROOT)))
def test_mpmd_imports_neither_ray_nor_cluster(path):
    assert not tops(path) & {"ray", "cluster"}


@pytest.mark.parametrize("path", CLUSTER, ids=lambda p: str(p.relative_to(ROOT)))
def test_cluster_imports_no_compiler_pass(path):
    assert not {f"mpmd.{name}" for name in PASSES | {"compile", "graph", "jaxpr"}} & imports(path)


@pytest.mark.parametrize("name", sorted(PASSES | PARTS))
def test_passes_do_not_import_one_another(name):
    others = {f"mpmd.{other}" for other in PASSES - {name}}
    assert not others & imports(ROOT / "mpmd" / f"{name}.py")


@pytest.mark.parametrize(
    "path",
    [p for p in MPMD if p.stem in WITHOUT_JAX or p.parent.name in {"render", "schedules", "simulate"}],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_the_plan_and_its_readers_need_no_jax(path):
    assert not tops(path) & {"jax", "jaxlib"}


@pytest.mark.parametrize("path", MPMD + CLUSTER, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_jax_only_in_compat(path):
    assert path.name == "compat.py" or not any(name.startswith("jax._src") for name in imports(path))


@pytest.mark.parametrize("path", MPMD + CLUSTER, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_can_be_read_at_once(path):
    assert len(path.read_text().splitlines()) <= 500
