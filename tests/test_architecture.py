"""The rules of the architecture that imports can break."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "mpmd").rglob("*.py"), *(ROOT / "cluster").rglob("*.py")])

MAY_IMPORT = {
    # Shared ground.
    "mpmd.compat": "",
    "mpmd.errors": "",
    "mpmd.ir": "mpmd.util mpmd.validation",
    "mpmd.validation": "",
    "mpmd.version": "",
    "mpmd.util": "mpmd.validation",
    "mpmd.keys": "mpmd.compat mpmd.ir",
    "mpmd.sharding": "mpmd.ir",
    "mpmd.program": "mpmd.compat mpmd.ir mpmd.language mpmd.sharding",
    # A step is written in it.
    "mpmd.language": "mpmd.compat mpmd.keys mpmd.schedules mpmd.sharding mpmd.util mpmd.validation",
    # Orders, and what reads a plan.
    "mpmd.schedules": "mpmd.ir mpmd.util mpmd.validation",
    "mpmd.memory": "mpmd.ir mpmd.util",
    "mpmd.verify": "mpmd.errors mpmd.ir mpmd.memory mpmd.util",
    "mpmd.simulate": "mpmd.ir mpmd.memory mpmd.schedules mpmd.util mpmd.validation mpmd.verify",
    "mpmd.render": "mpmd.ir mpmd.schedules mpmd.simulate mpmd.util mpmd.validation",
    "mpmd.attribution": "mpmd.ir mpmd.memory mpmd.simulate mpmd.util",
    "mpmd.render.page": "mpmd.attribution mpmd.ir mpmd.memory mpmd.render mpmd.simulate mpmd.util "
    "mpmd.version",
    "mpmd.profile": "mpmd.attribution mpmd.ir mpmd.render.page mpmd.util mpmd.validation",
    # Chooses how to run a step.
    "mpmd.planner": "",
    "mpmd.planner.fusions": "mpmd.compiler.jaxprs",
    "mpmd.planner.all_reduces": "",
    "mpmd.planner.curves": "mpmd.validation",
    "mpmd.planner.layer_profile": "mpmd.language mpmd.planner.all_reduces mpmd.planner.curves",
    "mpmd.planner.calibrate": "mpmd.ir mpmd.language mpmd.planner.curves mpmd.schedules mpmd.simulate "
    "mpmd.validation",
    "mpmd.planner.calibrate_collectives": "mpmd.ir mpmd.language mpmd.planner.calibrate mpmd.planner.curves "
    "mpmd.schedules",
    "mpmd.planner.hardware": "mpmd.memory mpmd.planner.curves mpmd.simulate mpmd.validation",
    "mpmd.planner.pools": "mpmd.memory mpmd.planner.hardware mpmd.simulate mpmd.validation",
    "mpmd.planner.record_steps": "mpmd.ir mpmd.meshes mpmd.step",
    "mpmd.planner.local_devices": "mpmd.meshes mpmd.planner.calibrate mpmd.planner.calibrate_collectives "
    "mpmd.planner.record_steps mpmd.validation",
    "mpmd.planner.cluster_file": "mpmd.memory mpmd.planner.hardware mpmd.planner.pools mpmd.util "
    "mpmd.validation",
    "mpmd.planner.presets": "mpmd.planner.curves mpmd.simulate",
    "mpmd.planner.cluster": "mpmd.planner.cluster_file mpmd.planner.hardware mpmd.planner.local_devices "
    "mpmd.planner.pools mpmd.planner.presets mpmd.planner.record_steps mpmd.simulate mpmd.util "
    "mpmd.validation",
    "mpmd.planner.submesh": "mpmd.planner.layer_profile",
    "mpmd.planner.expected_errors": "",
    "mpmd.planner.candidate": "mpmd.language mpmd.planner.expected_errors mpmd.planner.pools "
    "mpmd.planner.submesh mpmd.schedules",
    "mpmd.planner.constraints": "mpmd.language mpmd.planner.layer_profile mpmd.schedules mpmd.validation",
    "mpmd.planner.collectives": "mpmd.planner.curves mpmd.planner.hardware mpmd.planner.pools "
    "mpmd.planner.submesh mpmd.simulate",
    "mpmd.planner.reasons": "mpmd.planner.candidate mpmd.planner.layer_profile mpmd.planner.pools "
    "mpmd.schedules mpmd.util",
    "mpmd.planner.shared_cores": "mpmd.planner.curves mpmd.planner.pools",
    "mpmd.compiler.find_layers": "mpmd.compat mpmd.compiler.cut_scans mpmd.compiler.jaxprs mpmd.errors "
    "mpmd.language mpmd.sharding mpmd.util mpmd.validation",
    "mpmd.planner.profiling": "mpmd.compiler.cut_layers mpmd.compiler.find_layers mpmd.compiler.graph "
    "mpmd.compiler.jaxprs mpmd.compiler.request mpmd.compiler.shard mpmd.compiler.split mpmd.compiler.steps "
    "mpmd.compiler.trace mpmd.ir mpmd.keys mpmd.language mpmd.planner.all_reduces mpmd.planner.curves "
    "mpmd.planner.fusions mpmd.planner.layer_profile mpmd.schedules mpmd.util",
    "mpmd.planner.search": "mpmd.ir mpmd.language mpmd.planner.all_reduces mpmd.planner.candidate "
    "mpmd.planner.choice_table mpmd.planner.collectives mpmd.planner.constraints mpmd.planner.curves "
    "mpmd.planner.hardware mpmd.planner.layer_profile mpmd.planner.pools "
    "mpmd.planner.reasons mpmd.planner.shared_cores mpmd.planner.submesh "
    "mpmd.schedules mpmd.simulate mpmd.util mpmd.validation",
    "mpmd.planner.trials": "mpmd.arguments mpmd.compiler.find_layers mpmd.compiler.jaxprs "
    "mpmd.compiler.request mpmd.compiler.steps mpmd.errors mpmd.ir mpmd.language mpmd.memory mpmd.meshes "
    "mpmd.planner.all_reduces mpmd.planner.candidate mpmd.planner.collectives mpmd.planner.curves "
    "mpmd.planner.fusions mpmd.planner.hardware mpmd.planner.layer_profile mpmd.planner.pools "
    "mpmd.planner.profiling mpmd.planner.shared_cores mpmd.planner.submesh mpmd.program mpmd.runtime "
    "mpmd.simulate mpmd.step",
    "mpmd.planner.rerank": "mpmd.errors mpmd.planner.candidate mpmd.planner.choice_table "
    "mpmd.planner.pools mpmd.planner.reasons mpmd.planner.trials",
    "mpmd.planner.choice_table": "mpmd.language mpmd.planner.candidate mpmd.planner.layer_profile "
    "mpmd.planner.submesh mpmd.util",
    "mpmd.planner.choice": "mpmd.compat mpmd.language mpmd.meshes mpmd.planner.candidate "
    "mpmd.planner.choice_table mpmd.planner.cluster_file mpmd.planner.expected_errors "
    "mpmd.planner.hardware mpmd.planner.layer_profile mpmd.planner.pools mpmd.planner.search "
    "mpmd.planner.trials mpmd.simulate mpmd.step mpmd.util mpmd.validation",
    "mpmd.planner.choose": "mpmd.arguments mpmd.compat mpmd.planner.candidate mpmd.planner.choice "
    "mpmd.planner.constraints mpmd.planner.layer_profile mpmd.planner.pools mpmd.planner.reasons "
    "mpmd.planner.rerank mpmd.planner.search mpmd.planner.trials mpmd.schedules mpmd.step mpmd.util "
    "mpmd.validation",
    "mpmd.explanation": "mpmd.attribution mpmd.compiler.jaxprs mpmd.compiler.steps mpmd.errors mpmd.ir "
    "mpmd.memory mpmd.profile mpmd.simulate mpmd.util mpmd.validation mpmd.verify",
    "mpmd.cli": "mpmd.ir mpmd.language mpmd.memory mpmd.meshes mpmd.planner.choose mpmd.planner.cluster "
    "mpmd.planner.cluster_file mpmd.planner.curves mpmd.planner.hardware mpmd.planner.presets mpmd.profile "
    "mpmd.render mpmd.replay mpmd.schedules mpmd.simulate mpmd.step "
    "mpmd.util mpmd.validation mpmd.version",
    # The compiler. A pass imports no other pass.
    "mpmd.compiler.jaxprs": "mpmd.compat mpmd.ir mpmd.language mpmd.sharding",
    "mpmd.compiler.steps": "mpmd.compiler.jaxprs mpmd.ir mpmd.language mpmd.schedules mpmd.util",
    "mpmd.compiler.request": "mpmd.ir",
    "mpmd.compiler.argument_specs": "mpmd.compiler.jaxprs mpmd.compiler.request mpmd.compiler.steps mpmd.ir",
    "mpmd.compiler.graph": "mpmd.compiler.jaxprs mpmd.compiler.steps mpmd.ir",
    "mpmd.compiler.cut_scans": "mpmd.compat mpmd.compiler.jaxprs mpmd.errors mpmd.language mpmd.util",
    "mpmd.compiler.cut_layers": "mpmd.compiler.cut_scans mpmd.compiler.jaxprs mpmd.compiler.steps "
    "mpmd.errors mpmd.ir mpmd.keys mpmd.language mpmd.schedules mpmd.util",
    "mpmd.compiler.trace": "mpmd.compat mpmd.compiler.cut_scans mpmd.compiler.jaxprs mpmd.compiler.request "
    "mpmd.compiler.steps mpmd.errors mpmd.ir mpmd.language mpmd.sharding mpmd.util",
    "mpmd.compiler.split": "mpmd.compiler.graph mpmd.compiler.jaxprs mpmd.compiler.steps mpmd.errors mpmd.ir "
    "mpmd.keys mpmd.language mpmd.schedules mpmd.util",
    "mpmd.compiler.shard": "mpmd.compiler.argument_specs mpmd.compiler.graph mpmd.compiler.jaxprs "
    "mpmd.compiler.request mpmd.compiler.steps mpmd.ir mpmd.language mpmd.sharding",
    "mpmd.compiler.place": "mpmd.compiler.argument_specs mpmd.compiler.graph mpmd.compiler.jaxprs "
    "mpmd.compiler.steps mpmd.errors mpmd.ir mpmd.language",
    "mpmd.compiler.lower": "mpmd.compat mpmd.compiler.argument_specs mpmd.compiler.graph "
    "mpmd.compiler.jaxprs mpmd.errors mpmd.ir mpmd.keys mpmd.language mpmd.program mpmd.schedules "
    "mpmd.sharding",
    "mpmd.compiler": "",
    "mpmd.compiler.checks": "mpmd.compiler.graph mpmd.compiler.jaxprs mpmd.compiler.steps mpmd.ir "
    "mpmd.language",
    "mpmd.compiler.pipeline": "mpmd.compiler.argument_specs mpmd.compiler.checks mpmd.compiler.cut_layers "
    "mpmd.compiler.find_layers mpmd.compiler.lower mpmd.compiler.place mpmd.compiler.request "
    "mpmd.compiler.shard mpmd.compiler.split mpmd.compiler.steps mpmd.compiler.trace mpmd.ir mpmd.language "
    "mpmd.program mpmd.sharding mpmd.util mpmd.verify",
    # What runs a plan.
    "mpmd.runtime": "mpmd.compat mpmd.errors mpmd.ir mpmd.language mpmd.memory mpmd.program mpmd.sharding "
    "mpmd.util mpmd.validation",
    # What runs it on Ray: shared ground, connections, a process, the start, the driver.
    "cluster.protocol": "mpmd.compat mpmd.ir mpmd.program mpmd.runtime",
    "cluster.ray_compat": "",
    "cluster.tcp": "cluster.protocol",
    "cluster.transports": "cluster.protocol cluster.tcp mpmd.errors mpmd.ir mpmd.memory mpmd.runtime "
    "mpmd.sharding mpmd.validation",
    "cluster.process": "cluster.protocol cluster.tcp cluster.transports mpmd.compat mpmd.errors mpmd.ir "
    "mpmd.program mpmd.runtime mpmd.sharding mpmd.util",
    "cluster.start": "cluster.process cluster.protocol cluster.ray_compat cluster.tcp cluster.transports "
    "mpmd.errors mpmd.ir mpmd.validation",
    "cluster.driver": "cluster.process cluster.protocol cluster.tcp cluster.transports mpmd.errors "
    "mpmd.ir mpmd.memory mpmd.program mpmd.runtime mpmd.util",
    "cluster.recovery": "cluster.driver cluster.process cluster.protocol cluster.ray_compat cluster.start "
    "cluster.tcp mpmd.errors mpmd.ir mpmd.meshes mpmd.program mpmd.runtime mpmd.sharding "
    "mpmd.util mpmd.validation",
    "cluster.mesh": "cluster.driver cluster.protocol cluster.recovery mpmd.compat mpmd.errors mpmd.ir "
    "mpmd.meshes mpmd.runtime mpmd.validation",
    "cluster.metrics": "cluster.driver cluster.recovery mpmd.runtime",
    "cluster.launch": "cluster.driver cluster.mesh cluster.metrics cluster.process cluster.protocol "
    "cluster.recovery cluster.start cluster.transports mpmd.compat mpmd.meshes mpmd.runtime mpmd.util "
    "mpmd.validation",
    "cluster.describe": "cluster.launch cluster.start cluster.transports mpmd.ir mpmd.memory "
    "mpmd.planner.calibrate mpmd.planner.calibrate_collectives mpmd.planner.hardware mpmd.validation",
    "cluster": "cluster.describe cluster.launch cluster.mesh cluster.recovery",
    # The user's face.
    "mpmd.arrays": "mpmd.compat mpmd.ir mpmd.keys mpmd.runtime mpmd.sharding",
    "mpmd.meshes": "mpmd.compat mpmd.errors mpmd.ir mpmd.runtime mpmd.sharding mpmd.util mpmd.validation",
    "mpmd.arguments": "mpmd.arrays mpmd.errors mpmd.ir mpmd.keys mpmd.runtime mpmd.sharding mpmd.util "
    "mpmd.validation",
    "mpmd.checkpoint": "mpmd.arguments mpmd.arrays mpmd.compat mpmd.errors mpmd.ir mpmd.keys mpmd.meshes "
    "mpmd.runtime mpmd.util mpmd.validation",
    "mpmd.replay": "mpmd.compat mpmd.util mpmd.validation",
    "mpmd.capture": "mpmd.compat mpmd.compiler.jaxprs mpmd.compiler.lower mpmd.ir mpmd.keys mpmd.program "
    "mpmd.replay mpmd.runtime mpmd.sharding mpmd.version",
    "mpmd.step": "mpmd.arguments mpmd.arrays mpmd.capture mpmd.checkpoint mpmd.compat "
    "mpmd.compiler.pipeline mpmd.compiler.request mpmd.compiler.steps mpmd.errors mpmd.explanation mpmd.ir "
    "mpmd.memory mpmd.meshes mpmd.profile mpmd.program mpmd.runtime mpmd.sharding mpmd.simulate mpmd.util "
    "mpmd.validation mpmd.verify",
    "mpmd.checking": "mpmd.arrays mpmd.compat mpmd.compiler.jaxprs mpmd.step mpmd.util mpmd.validation",
    "mpmd.watching": "mpmd.runtime mpmd.util mpmd.validation",
    "mpmd": "",
    # The one door: the only module of mpmd that imports cluster, when one of its names is used.
    "mpmd.on_ray": "cluster.launch cluster.mesh cluster.recovery mpmd.util",
    # Programs, which nothing imports. They use the public names, as a user's program does.
    "mpmd.__main__": "mpmd.cli",
    "cluster.trial": "cluster cluster.launch cluster.mesh cluster.start mpmd mpmd.arrays mpmd.language "
    "mpmd.meshes mpmd.schedules mpmd.step",
}
"""For each package, and each module that is in none, what of this project it may import."""

NEVER_REACHES = [
    ("mpmd", "cluster"),
    ("cluster", "mpmd.compiler"),
    ("mpmd.runtime", "mpmd.compiler"),
    ("mpmd.compiler", "mpmd.runtime"),
    ("cluster.process", "cluster.start"),
    ("cluster.process", "cluster.driver"),
    ("cluster.start", "cluster.driver"),
    ("cluster.driver", "cluster.start"),
]
"""Packages of which the first does not import the second, by way of others either; programs may."""

DOOR = "mpmd.on_ray"
"""Hands on names of ``cluster``. Nothing of this project imports it."""

PROGRAMS = {"mpmd.__main__", "cluster.trial"}

WITHOUT_JAX = (
    "mpmd mpmd.attribution.findings mpmd.cli mpmd.profile.profile mpmd.render mpmd.schedules mpmd.simulate "
    "mpmd.verify"
).split()


@functools.cache
def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def unit_of(module):
    """The row of the table that a module, or a name in a module, belongs to."""
    while module not in MAY_IMPORT:
        module = module.rpartition(".")[0]
        assert module, "the table has no row for it"
    return module


def names_handed_on(package, path):
    """The public names of a package, each with the name where it is defined."""
    return {
        f"{package}.{alias.name}": ".".join(filter(None, (node.level * package, node.module, alias.name)))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


PUBLIC_NAMES = {
    **names_handed_on("mpmd", ROOT / "mpmd" / "__init__.pyi"),
    **names_handed_on("cluster", ROOT / "cluster" / "__init__.py"),
}


@functools.cache
def imports(path):
    """The modules and names that a file imports, anywhere in it.

    A public name counts as where it is defined, because a use of ``mpmd.jit`` imports that module.
    """
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            names.add(f"{node.value.id}.{node.attr}")
    return {PUBLIC_NAMES.get(name, name) for name in names}


def imported_units(unit):
    names = {name for path in FILES if unit_of(module_of(path)) == unit for name in imports(path)}
    ours = {name for name in names if name.split(".")[0] in ("mpmd", "cluster")}
    return {unit_of(name) for name in ours} - {unit}


def test_every_file_has_a_row():
    without = [
        str(path)
        for path in FILES
        if unit_of(module_of(path)) in ("cluster", "mpmd", "mpmd.compiler", "mpmd.planner")
        and path.name != "__init__.py"
    ]
    assert not without


def test_every_row_has_a_file():
    assert set(MAY_IMPORT) == {unit_of(module_of(path)) for path in FILES}


def test_imports_are_those_of_the_table():
    found = {unit: imported_units(unit) for unit in MAY_IMPORT}
    table = {unit: set(row.split()) for unit, row in MAY_IMPORT.items()}
    missing = {unit: names for unit in MAY_IMPORT if (names := found[unit] - table[unit])}
    in_vain = {unit: names for unit in MAY_IMPORT if (names := table[unit] - found[unit])}
    assert not missing and not in_vain


def test_nothing_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter({unit: row.split() for unit, row in MAY_IMPORT.items()}).prepare()


def test_no_file_imports_itself_by_way_of_others():
    """In a room, too. The files of a package may be imported by way of its ``__init__``."""
    paths = {module_of(path): path for path in FILES}

    def module_that_defines(name):
        return name if name in paths else name.rpartition(".")[0]

    imported = {module: map(module_that_defines, imports(path)) for module, path in paths.items()}
    graph = {module: {name for name in names if name in paths} for module, names in imported.items()}
    graphlib.TopologicalSorter({module: names - {module} for module, names in graph.items()}).prepare()


def units_within(package):
    return {unit for unit in MAY_IMPORT if f"{unit}.".startswith(f"{package}.")}


@pytest.mark.parametrize(("package", "other"), NEVER_REACHES)
def test_nothing_reaches_what_it_must_not_know(package, other):
    reached = units_within(package) - PROGRAMS - {DOOR}
    assert reached, "the table has no such package"
    while further := {needed for unit in reached for needed in MAY_IMPORT[unit].split()} - reached:
        reached |= further
    assert not reached & units_within(other)


def test_no_module_goes_through_the_door():
    assert [unit for unit, row in MAY_IMPORT.items() if DOOR in row.split()] == []


def importing(matches):
    """The files that import a module of a name that matches."""
    return [path for path in FILES if any(map(matches, imports(path)))]


def test_only_cluster_imports_ray():
    importers = importing(lambda name: name.split(".")[0] == "ray")
    assert [path for path in importers if not path.is_relative_to(ROOT / "cluster")] == []


def test_importing_them_loads_neither_jax_nor_scipy():
    """A process of its own imports the packages, so that their imports count, and the imports of these."""
    imports = "; ".join(f"import {name}; print({name!r}, *sys.modules)" for name in WITHOUT_JAX)
    program = f"import sys; {imports}"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    for line in loaded.stdout.splitlines():
        name, *modules = line.split()
        assert not {"jax", "jaxlib", "scipy", "ray", "matplotlib"} & set(modules), name


def test_private_jax_only_in_compat():
    importers = importing(lambda name: name.startswith("jax._src"))
    assert {path.name for path in importers} == {"compat.py"}


def test_private_orbax_only_in_orbax_internals():
    importers = importing(lambda name: "checkpoint._src" in name)
    assert {path.name for path in importers} == {"orbax_internals.py"}


def test_private_ray_only_in_ray_compat():
    assert {path.name for path in FILES if "ray._private" in path.read_text()} == {"ray_compat.py"}


def test_only_checkpoints_load_orbax():
    program = "import sys, mpmd.step.jit, cluster; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert not {"orbax", "tensorstore"} & set(loaded.stdout.split())


def test_files_can_be_read_at_once():
    assert [path for path in FILES if len(path.read_text().splitlines()) > 400] == []
