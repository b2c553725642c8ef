"""What the documents tell to install, and examples of theirs that no other file has."""

import inspect
import json
import re
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.models import batch, init, layer, make_step, mlp, mse, weights
from tests.support.pages import blocks, run
from tests.support.parity import assert_close, assert_parity, mesh_of
from tests.support.planned_steps import CLUSTER

ROOT = Path(__file__).parents[2]


def test_a_job_installs_what_the_project_needs():
    environment = re.search(r"--runtime-env-json '(.*)'", (ROOT / "docs" / "clusters.md").read_text())
    requirements = (ROOT / json.loads(environment[1])["pip"]).read_text()
    listed = {re.split("[=<>]", line)[0] for line in requirements.splitlines()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[\[=<>]", dependency)[0] for dependency in project["dependencies"]}
    # Ray is there already, and jax brings the other two.
    assert needed - {"ray", "jaxlib", "scipy"} <= listed


def test_examples_name_the_libraries_that_they_need():
    """What an example imports, or a module of the examples that it imports, is installed or in its row."""
    table = (ROOT / "docs" / "examples.md").read_text()
    rows = dict(re.findall(r"^\| `examples/(\w+)\.py` \| ([^|]*?) ?\|", table, re.MULTILINE))
    installed = {"jax", "mpmd", "numpy", "optax", "cluster", "ray", *sys.stdlib_module_names}
    examples = {path.stem: path for path in (ROOT / "examples").glob("*.py")}

    def imported(name):
        for root in re.findall(r"^ *(?:import|from) (\w+)", examples[name].read_text(), re.MULTILINE):
            yield from imported(root) if root in examples else [root]

    programs = {name for name, path in examples.items() if '__name__ == "__main__"' in path.read_text()}
    assert rows.keys() == programs
    for name, needs in rows.items():
        assert {*imported(name)} - installed <= {*filter(None, re.split(r",? ", needs))}, name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(dependency.startswith("optax") for dependency in project["dependencies"])
    extras = " ".join(map(str, project["optional-dependencies"].values()))
    assert all(library in extras for needs in rows.values() for library in re.split(r",? ", needs))


def test_the_train_step_computes_what_plain_jax_computes(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")  # which the example sets where nothing else does
    step, on_ray = blocks("../README.md")
    assert "mpmd.launch" in on_ray
    definition, call, _ = step.partition("params, loss = step(")
    assert call
    namespace = {}
    exec(definition, namespace)
    expected = jax.jit(namespace["train_step"])(*(namespace[name] for name in ("params", "x", "y")))
    with namespace["mesh"]:
        exec(step.removeprefix(definition), namespace)
        assert_close((namespace["params"], namespace["loss"]), expected)


def test_the_ten_lines_of_the_landing_page_compute_what_plain_jax_computes():
    names = run(blocks("index.md"))
    params, x = [jnp.eye(4), jnp.full((4, 1), 0.5)], jnp.linspace(-1, 1, 64).reshape(16, 4)
    arguments = params, x, jnp.sin(x[:, :1])
    with names["mesh"]:
        assert_close(names["step"](*arguments), jax.jit(names["train_step"])(*arguments))


def test_the_address_to_clone_is_in_one_place():
    pages = {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
    assert [path.name for path, text in pages.items() if "git clone" in text] == ["README.md"]
    assert not [path for path, text in pages.items() if re.search(r"pip install '?mpmd", text)]


def test_the_commands_of_the_readme_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"demo", "test", "docs"} <= set(re.findall(r"^make (\S+)", readme, re.MULTILINE)) <= targets
    assert targets - {"clean", "demo"} <= set(re.findall(r"`make (\S+)`", contributing))
    assert readme.count("\n") < 120


@pytest.mark.slow
def test_the_choice_of_a_plan_computes_what_plain_jax_computes():
    section = (ROOT / "docs" / "planner.md").read_text().split("## Choosing\n")[1].split("\n#")[0]
    open_step, chosen = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert "mpmd.launch(**choice.launch)" in chosen
    namespace = {"mpmd": mpmd, "jax": jax, "loss_fn": mse}
    exec(open_step, namespace)
    x, y = (rows.reshape(-1, rows.shape[-1]) for rows in batch())
    arguments = (weights(4), x, y)
    choice = mpmd.plan(namespace["train_step"], *arguments, cluster=CLUSTER, simulate=1)
    inspect.signature(mpmd.launch).bind(**choice.launch)
    expected = jax.jit(namespace["train_step"])(*arguments)
    with choice.mesh() as mesh:
        assert_close(choice.jit(mesh)(*arguments), expected)


def defined_in(section):
    """What the code of a section of the guide defines."""
    text = (ROOT / "docs" / "guide.md").read_text().split(f"## {section}\n")[1].split("\n#")[0]
    names = {"jax": jax, "jnp": jnp, "mpmd": mpmd, "P": P}
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), names)
    return names


@pytest.mark.slow
def test_the_example_of_a_loop():
    names = defined_in("Combining microbatches")
    names["loss_fn"] = mse
    params, rows = weights(4), tuple(rows.reshape(-1, rows.shape[-1]) for rows in batch(8))
    with mesh_of(4) as mesh:
        actual = mpmd.jit(names["train_step"], mesh)(params, rows)
    loss, grads = jax.value_and_grad(mse)(params, *rows)
    assert_close(actual, (jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss))


def test_the_examples_of_several_loops_and_passes():
    layers = {
        "network": mlp,
        "discriminator_layers": lambda params, x: jnp.mean(mlp(params, x), -1),
        "generate": lambda params, z, mark=lambda h: h: layer(params[1], mark(layer(params[0], z))),
    }
    names = {"jax": jax, "jnp": jnp, "mpmd": mpmd, "mesh": mesh_of(4), **layers}
    names = run(blocks("several_loops.md"), **names)
    loaded = assert_parity(names["train_step"], (weights(4)[:2], weights(4)[2:]), *batch(), mesh=mesh_of(4))
    homes = [leaf.mpmd_idxs[-1] for leaf in loaded.plan.inputs[:8]]
    assert homes == [2, 2, 3, 3, 0, 0, 1, 1]
    step = make_step(names["recycled"], names["schedule"])
    assert_parity(step, init(weights(2)), *batch(), mesh=mesh_of(2))


def test_the_example_of_explicit_sharding():
    names = defined_in("Explicit sharding")
    params = [stage["w"] for stage in weights(2)]
    with names["mesh"]:
        actual = names["step"](params, *batch())
        with jax.set_mesh(jax.make_mesh((1, 1), ("stage", "fsdp"), devices=jax.devices()[:1])):
            assert_close(actual, jax.jit(names["explicit_step"])(params, *batch()))
        assert actual[0][0].spec == P("fsdp")
