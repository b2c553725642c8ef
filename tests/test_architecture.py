"""The rules of the architecture that imports can break."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "mpmd").rglob("*.py"), *(ROOT / "cluster").rglob("*.py")])

MAY_IMPORT = {
    # Shared ground.
    "mpmd.compat": "",
    "mpmd.delegation": "",
    "mpmd.device_trace": "mpmd.validation",
    "mpmd.errors": "",
    "mpmd.executable_memory": "",
    "mpmd.tasks": "",
    "mpmd.ir": "mpmd.executable_memory mpmd.tasks",
    "mpmd.garbage": "",
    "mpmd.stopwatch": "",
    "mpmd.private_directory": "",
    "mpmd.tables": "",
    "mpmd.text_files": "",
    "mpmd.tracers": "",
    "mpmd.validation": "",
    "mpmd.tree": "mpmd.validation",
    "mpmd.version": "",
    "mpmd.names": "mpmd.ir",
    "mpmd.stack": "",
    "mpmd.placement": "mpmd.ir mpmd.stack",
    "mpmd.specs": "mpmd.ir",
    "mpmd.events": "mpmd.ir mpmd.validation",
    "mpmd.keys": "mpmd.compat mpmd.ir",
    "mpmd.sharding": "mpmd.ir",
    "mpmd.callbacks": "mpmd.keys",
    "mpmd.program": "mpmd.callbacks mpmd.ir mpmd.sharding",
    "mpmd.collectives": "",
    "mpmd.reshard": "mpmd.ir mpmd.specs",
    "mpmd.routes": "mpmd.ir mpmd.reshard mpmd.specs",
    # Orders, and what reads a plan.
    "mpmd.schedules": "mpmd.ir mpmd.text_files mpmd.validation",
    "mpmd.memory": "mpmd.ir mpmd.routes mpmd.specs",
    "mpmd.verify": "mpmd.errors mpmd.ir mpmd.memory mpmd.specs",
    "mpmd.simulate": "mpmd.events mpmd.ir mpmd.memory mpmd.routes mpmd.schedules mpmd.validation",
    "mpmd.render": "mpmd.events mpmd.ir mpmd.schedules mpmd.simulate mpmd.tables mpmd.validation",
    # Chooses how to run a step.
    "mpmd.planner": "",
    "mpmd.planner.profile": "",
    "mpmd.planner.calibrate": "mpmd mpmd.events mpmd.ir mpmd.simulate mpmd.validation",
    "mpmd.planner.here": "mpmd mpmd.mesh mpmd.planner.calibrate mpmd.validation",
    "mpmd.planner.hardware": "mpmd.memory mpmd.planner.here mpmd.simulate mpmd.validation",
    "mpmd.planner.candidate": "mpmd.planner.profile mpmd.schedules",
    "mpmd.planner.fixed": "mpmd.planner.profile mpmd.schedules mpmd.validation",
    "mpmd.planner.collectives": "mpmd.planner.hardware mpmd.planner.profile mpmd.simulate",
    "mpmd.planner.reasons": "mpmd.planner.candidate mpmd.planner.hardware mpmd.tables",
    "mpmd.planner.shared_cores": "mpmd.planner.hardware",
    "mpmd.compiler.find_layers": "mpmd.annotate mpmd.compiler.jaxprs mpmd.compiler.cut_layers mpmd.compiler.trace "
    "mpmd.decisions mpmd.errors mpmd.reduce mpmd.schedules mpmd.tables mpmd.validation",
    "mpmd.planner.profiling": "mpmd.compiler.graph mpmd.compiler.jaxprs mpmd.compiler.shard "
    "mpmd.compiler.split mpmd.compiler.trace mpmd.decisions mpmd.garbage mpmd.ir mpmd.keys "
    "mpmd.compiler.find_layers mpmd.planner.profile mpmd.schedules mpmd.stack",
    "mpmd.planner.search": "mpmd.ir mpmd.planner.candidate mpmd.planner.choice_table "
    "mpmd.planner.collectives mpmd.planner.fixed mpmd.planner.hardware mpmd.planner.labels "
    "mpmd.planner.profile mpmd.planner.reasons mpmd.planner.shared_cores mpmd.schedules mpmd.simulate "
    "mpmd.tables mpmd.tasks",
    "mpmd.planner.trials": "mpmd.abstract_mesh mpmd.arguments mpmd.compat mpmd.compiler.graph "
    "mpmd.compiler.jaxprs mpmd.decisions mpmd.events mpmd.executable_memory mpmd.ir "
    "mpmd.lowered_step mpmd.memory mpmd.planned_step mpmd.planner.candidate mpmd.planner.collectives "
    "mpmd.planner.hardware mpmd.planner.profile "
    "mpmd.planner.profiling mpmd.planner.shared_cores mpmd.program mpmd.routes mpmd.runtime mpmd.sharding "
    "mpmd.simulate mpmd.specs mpmd.step",
    "mpmd.planner.labels": "mpmd.planner.candidate mpmd.planner.profile",
    "mpmd.planner.contest": "mpmd.errors mpmd.planner.candidate mpmd.planner.choice_table "
    "mpmd.planner.hardware mpmd.planner.labels mpmd.planner.reasons mpmd.planner.trials",
    "mpmd.planner.choice_table": "mpmd.planner.candidate mpmd.planner.collectives mpmd.planner.hardware "
    "mpmd.planner.profile mpmd.tables",
    "mpmd.planner.choice": "mpmd.decisions mpmd.mesh mpmd.planner.candidate mpmd.planner.choice_table "
    "mpmd.planner.hardware mpmd.planner.profile mpmd.planner.search mpmd.planner.trials mpmd.simulate "
    "mpmd.step mpmd.tables mpmd.validation",
    "mpmd.planner.choose": "mpmd.arguments mpmd.planner.candidate mpmd.planner.choice mpmd.planner.contest "
    "mpmd.planner.fixed mpmd.planner.hardware mpmd.planner.profile mpmd.planner.reasons mpmd.planner.search "
    "mpmd.planner.trials mpmd.schedules mpmd.step mpmd.validation",
    "mpmd.explanation": "mpmd.compiler.graph mpmd.compiler.jaxprs mpmd.errors mpmd.ir mpmd.memory "
    "mpmd.routes mpmd.simulate mpmd.specs mpmd.tables mpmd.validation mpmd.verify",
    "mpmd.cli": "mpmd.abstract_mesh mpmd.ir mpmd.lowered_step mpmd.planned_step mpmd.planner.choose "
    "mpmd.planner.hardware mpmd.private_directory mpmd.render mpmd.schedules mpmd.simulate mpmd.step "
    "mpmd.tables mpmd.text_files mpmd.version",
    # The compiler. A pass imports no other pass.
    "mpmd.decisions": "mpmd.schedules",
    "mpmd.annotate": "mpmd.validation",
    "mpmd.per_group": "mpmd.sharding mpmd.validation",
    "mpmd.carry": "mpmd.sharding",
    "mpmd.operations": "mpmd.validation",
    "mpmd.pieces": "mpmd.decisions mpmd.sharding mpmd.tables mpmd.validation",
    "mpmd.reduce": "mpmd.carry mpmd.compat mpmd.decisions mpmd.operations mpmd.schedules mpmd.sharding "
    "mpmd.tables mpmd.tree mpmd.validation",
    "mpmd.gradients": "mpmd.operations mpmd.pieces mpmd.compiler.find_layers mpmd.reduce mpmd.schedules "
    "mpmd.sharding mpmd.tables mpmd.tree mpmd.validation",
    "mpmd.compiler.jaxprs": "mpmd.compat mpmd.ir mpmd.per_group mpmd.sharding mpmd.specs",
    "mpmd.compiler.graph": "mpmd.annotate mpmd.compiler.jaxprs mpmd.ir mpmd.schedules mpmd.stack",
    "mpmd.compiler.cut_layers": "mpmd.annotate mpmd.compiler.jaxprs mpmd.errors mpmd.reduce mpmd.stack",
    "mpmd.compiler.trace": "mpmd.annotate mpmd.callbacks mpmd.compat mpmd.compiler.graph "
    "mpmd.compiler.jaxprs mpmd.compiler.cut_layers mpmd.errors mpmd.ir mpmd.keys mpmd.reduce mpmd.schedules "
    "mpmd.sharding mpmd.specs mpmd.stack mpmd.tracers mpmd.tree",
    "mpmd.compiler.split": "mpmd.annotate mpmd.callbacks mpmd.compiler.graph mpmd.compiler.jaxprs "
    "mpmd.errors mpmd.ir mpmd.keys mpmd.reduce mpmd.schedules",
    "mpmd.compiler.shard": "mpmd.compiler.graph mpmd.compiler.jaxprs mpmd.ir mpmd.per_group mpmd.placement "
    "mpmd.specs mpmd.stack",
    "mpmd.compiler.place": "mpmd.callbacks mpmd.compiler.graph mpmd.compiler.jaxprs mpmd.errors mpmd.ir "
    "mpmd.specs mpmd.stack",
    "mpmd.compiler.lower": "mpmd.callbacks mpmd.compat mpmd.compiler.graph mpmd.compiler.jaxprs mpmd.errors "
    "mpmd.ir mpmd.keys mpmd.names mpmd.per_group mpmd.program mpmd.schedules mpmd.sharding mpmd.specs",
    "mpmd.compiler": "",
    "mpmd.compiler.checks": "mpmd.annotate mpmd.compiler.graph mpmd.compiler.jaxprs",
    "mpmd.compiler.pipeline": "mpmd.compiler.checks mpmd.compiler.graph mpmd.compiler.lower "
    "mpmd.compiler.place mpmd.compiler.shard mpmd.compiler.split mpmd.compiler.trace mpmd.garbage mpmd.ir "
    "mpmd.placement mpmd.program mpmd.sharding mpmd.stack mpmd.stopwatch mpmd.verify",
    # What runs a plan.
    "mpmd.runtime": "mpmd.callbacks mpmd.collectives mpmd.compat mpmd.device_trace mpmd.errors mpmd.events "
    "mpmd.executable_memory mpmd.ir mpmd.memory mpmd.names mpmd.placement mpmd.program mpmd.reshard "
    "mpmd.routes mpmd.sharding mpmd.specs mpmd.stopwatch mpmd.tables mpmd.validation",
    # What runs it on Ray: shared ground, the actor and its transports, then the driver.
    "cluster.digests": "",
    "cluster.endpoint": "mpmd.reshard",
    "cluster.environment": "mpmd.private_directory",
    "cluster.process_info": "cluster.versions",
    "cluster.ray_compat": "",
    "cluster.packing": "",
    "cluster.resources": "",
    "cluster.tcp": "cluster.digests",
    "cluster.versions": "",
    "cluster.world": "mpmd.compat",
    "cluster.agreement": "cluster.tcp cluster.world mpmd.errors mpmd.runtime",
    "cluster.transports": "cluster.agreement cluster.digests cluster.endpoint cluster.packing "
    "cluster.process_info cluster.tcp mpmd.errors mpmd.ir mpmd.memory mpmd.reshard mpmd.routes "
    "mpmd.runtime mpmd.sharding",
    "cluster.devices": "cluster.environment mpmd.private_directory mpmd.reshard",
    "cluster.actor": "cluster.agreement cluster.devices cluster.endpoint cluster.packing "
    "cluster.process_info cluster.shipment cluster.tcp cluster.transports cluster.versions cluster.world "
    "mpmd.collectives mpmd.device_trace mpmd.errors mpmd.ir mpmd.reshard mpmd.routes mpmd.runtime",
    "cluster.needs": "cluster.endpoint cluster.environment cluster.resources cluster.shapes mpmd.reshard "
    "mpmd.validation",
    "cluster.actors": "cluster.actor cluster.endpoint cluster.environment cluster.needs cluster.resources",
    "cluster.calls": "cluster.endpoint cluster.process_info cluster.ray_session cluster.status cluster.tcp "
    "cluster.transports cluster.world mpmd.errors mpmd.runtime mpmd.validation",
    "cluster.status": "cluster.process_info mpmd.errors mpmd.tables",
    "cluster.shipment": "mpmd.ir mpmd.program mpmd.stopwatch",
    "cluster.ray_session": "",
    "cluster.arguments": "cluster.packing mpmd.ir mpmd.reshard mpmd.routes mpmd.runtime",
    "cluster.driver": "cluster.arguments cluster.calls cluster.endpoint cluster.packing cluster.shipment "
    "cluster.status mpmd.collectives mpmd.device_trace mpmd.errors mpmd.ir mpmd.memory mpmd.program "
    "mpmd.routes mpmd.runtime mpmd.stopwatch",
    "cluster.shapes": "mpmd.reshard mpmd.validation",
    "cluster.connect": "cluster.endpoint cluster.process_info cluster.tcp cluster.transports "
    "cluster.versions mpmd.ir",
    "cluster.recovery": "cluster.actor cluster.actors cluster.agreement cluster.calls cluster.connect "
    "cluster.digests cluster.driver cluster.endpoint cluster.process_info cluster.ray_compat "
    "cluster.ray_session cluster.resources cluster.status cluster.tcp cluster.transports cluster.versions "
    "mpmd.collectives mpmd.device_trace mpmd.errors mpmd.ir mpmd.program mpmd.reshard mpmd.runtime "
    "mpmd.sharding mpmd.stopwatch mpmd.validation",
    "cluster.mesh": "cluster.driver cluster.process_info cluster.recovery cluster.status mpmd.routes "
    "mpmd.validation",
    "cluster.ray_connection": "cluster.ray_compat cluster.resources",
    "cluster.launch": "cluster.actor cluster.actors cluster.calls cluster.connect cluster.driver "
    "cluster.endpoint cluster.environment cluster.mesh cluster.needs cluster.process_info "
    "cluster.ray_connection cluster.recovery cluster.resources cluster.shapes cluster.tcp "
    "cluster.transports cluster.versions mpmd.routes mpmd.runtime mpmd.stopwatch mpmd.validation",
    "cluster.describe": "cluster.environment cluster.launch cluster.ray_connection cluster.resources "
    "cluster.shapes mpmd.memory mpmd.planner.calibrate mpmd.planner.hardware mpmd.validation",
    "cluster": "cluster.describe cluster.launch cluster.mesh cluster.recovery",
    "cluster.trial": "cluster cluster.ray_connection cluster.resources mpmd",
    # The user's face.
    "mpmd.abstract_mesh": "mpmd.reshard mpmd.routes mpmd.runtime mpmd.validation",
    "mpmd.mesh": "mpmd.reshard mpmd.routes mpmd.runtime mpmd.sharding mpmd.validation",
    "mpmd.array": "mpmd.compat mpmd.delegation mpmd.ir mpmd.keys mpmd.placement mpmd.runtime mpmd.sharding "
    "mpmd.specs mpmd.stack",
    "mpmd.stacked_array": "mpmd.array mpmd.compat mpmd.ir mpmd.placement mpmd.runtime mpmd.stack",
    "mpmd.arguments": "mpmd.array mpmd.errors mpmd.ir mpmd.keys mpmd.placement mpmd.runtime mpmd.sharding "
    "mpmd.specs mpmd.stack mpmd.tables mpmd.tracers mpmd.tree mpmd.validation",
    "mpmd.checkpoint": "mpmd.arguments mpmd.array mpmd.compat mpmd.errors mpmd.ir mpmd.keys mpmd.mesh "
    "mpmd.placement mpmd.runtime mpmd.stacked_array mpmd.validation",
    "mpmd.initialize": "mpmd.arguments mpmd.compiler.pipeline mpmd.errors mpmd.ir mpmd.mesh mpmd.tree",
    "mpmd.planned_step": "mpmd.compiler.pipeline mpmd.explanation mpmd.ir mpmd.routes mpmd.simulate "
    "mpmd.validation",
    "mpmd.submitted_step": "mpmd.arguments mpmd.array mpmd.compiler.graph mpmd.ir mpmd.runtime mpmd.stack "
    "mpmd.stacked_array",
    "mpmd.loaded_step": "mpmd.arguments mpmd.checkpoint mpmd.collectives mpmd.compiler.pipeline "
    "mpmd.device_trace mpmd.events mpmd.explanation mpmd.initialize mpmd.ir mpmd.mesh mpmd.placement "
    "mpmd.planned_step mpmd.routes mpmd.runtime mpmd.stack mpmd.stopwatch mpmd.submitted_step "
    "mpmd.validation mpmd.verify",
    "mpmd.lowered_step": "mpmd.arguments mpmd.compiler.pipeline mpmd.explanation mpmd.ir mpmd.loaded_step "
    "mpmd.mesh mpmd.planned_step mpmd.routes mpmd.validation",
    "mpmd.step": "mpmd.arguments mpmd.array mpmd.compat mpmd.compiler.graph mpmd.compiler.pipeline "
    "mpmd.events mpmd.explanation mpmd.ir mpmd.loaded_step mpmd.lowered_step mpmd.mesh mpmd.placement "
    "mpmd.runtime mpmd.validation",
    "mpmd.checking": "mpmd.arguments mpmd.array mpmd.compiler.jaxprs mpmd.loaded_step mpmd.step "
    "mpmd.tables mpmd.tree mpmd.validation",
    "mpmd.__main__": "mpmd.cli",
    "mpmd": "",
}
"""For each package, and each module that is in none, what of this project it may import."""

NEVER_REACHES = [
    ("mpmd", "cluster"),
    ("cluster", "mpmd.compiler"),
    ("mpmd.runtime", "mpmd.compiler"),
    ("mpmd.compiler", "mpmd.runtime"),
    ("cluster.transports", "cluster.driver"),
]
"""Packages of which the first does not import the second, by way of others either."""

WITHOUT_JAX = "mpmd mpmd.schedules mpmd.simulate mpmd.verify mpmd.render mpmd.cli".split()


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module):
    """The row of the table that a module, or a name in a module, belongs to."""
    while module not in MAY_IMPORT:
        module = module.rpartition(".")[0]
        assert module, "the table has no row for it"
    return module


def imports(path):
    """The modules and names that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def imported_units(unit):
    own = {name for path in FILES if unit_of(module_of(path)) == unit for name in imports(path)}
    ours = {name for name in own if name.split(".")[0] in ("mpmd", "cluster")}
    return {unit_of(name) for name in ours} - {unit}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_every_file_has_a_row(path):
    assert unit_of(module_of(path)) not in ("cluster", "mpmd", "mpmd.compiler") or path.name == "__init__.py"


@pytest.mark.parametrize("unit", MAY_IMPORT)
def test_imports_are_those_of_the_table(unit):
    assert imported_units(unit) == set(MAY_IMPORT[unit].split())


def test_nothing_imports_itself_by_way_of_others():
    done, pending = set(), dict(MAY_IMPORT)
    while ready := [unit for unit, needed in pending.items() if set(needed.split()) <= done]:
        done.update(ready)
        for unit in ready:
            del pending[unit]
    assert not pending


def units_within(package):
    return {unit for unit in MAY_IMPORT if f"{unit}.".startswith(f"{package}.")}


@pytest.mark.parametrize(("package", "other"), NEVER_REACHES)
def test_nothing_reaches_what_it_must_not_know(package, other):
    reached = units_within(package)
    assert reached, "the table has no such package"
    while further := {needed for unit in reached for needed in MAY_IMPORT[unit].split()} - reached:
        reached |= further
    assert not reached & units_within(other)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_cluster_imports_ray(path):
    assert path.is_relative_to(ROOT / "cluster") or not any(
        name.split(".")[0] == "ray" for name in imports(path)
    )


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_importing_it_loads_neither_jax_nor_scipy(module):
    """In a process of its own, so that what is imported by what is imported counts."""
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert not {"jax", "jaxlib", "scipy", "ray", "matplotlib"} & set(loaded.stdout.split())


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_private_jax_only_in_compat(path):
    assert path.name == "compat.py" or not any(name.startswith("jax._src") for name in imports(path))


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_private_orbax_only_in_orbax_internals(path):
    assert path.name == "orbax_internals.py" or not any("checkpoint._src" in name for name in imports(path))


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_private_ray_only_in_ray_compat(path):
    assert path.name == "ray_compat.py" or "ray._private" not in path.read_text()


def test_only_checkpoints_load_orbax():
    program = "import sys, mpmd.step, cluster; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert not {"orbax", "tensorstore"} & set(loaded.stdout.split())


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_can_be_read_at_once(path):
    assert len(path.read_text().splitlines()) <= 400
