"""The how-to pages on models, training and migrations run, and compute what plain JAX computes."""

import math
import re
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support import pages
from tests.support.parity import assert_close

HOW_TO = pages.DOCS / "how_to"

STEPS = {
    "models#flax linen": ("train_step", "state, x, labels", "trained, (loss, logits, accuracy)"),
    "models#flax nnx": ("train_step", "state, x, y", "trained, loss"),
    "models#equinox": ("train_step", "state, x, y", "trained, loss"),
    "models#haiku": ("train_step", "state, x, y", "trained, loss"),
    "recipes#Mixed precision": ("train_step", "params, scale, x, y", "trained, new_scale, loss"),
    "recipes#A mean over tokens": ("train_step", "params, x, y, is_token", "trained, loss"),
    "recipes#Dropout": ("train_step", "params, key, x, y", "trained, loss"),
    "recipes#Batch statistics": ("train_step", "params, stats, x, y", "trained, new_stats, loss"),
    "recipes#Frozen layers": ("train_step", "student, teacher, x", "trained, loss"),
    "recipes#Evaluation and sampling": ("evaluate", "params, x, y", "predictions, num_correct"),
    "from_pmap": ("train_step", "params, x, y", "trained, loss"),
    "from_jaxpp": ("train_step", "params, x, y", "trained, loss"),
}
"""For each page, or section of one, its step, the arguments that the page calls it with, and the results."""


def code_of(page):
    """The blocks of a page; of ``models#haiku``, of this section after the blocks before the first one."""
    name, _, section = page.partition("#")
    introduction, *sections = re.split(r"^## ", (HOW_TO / f"{name}.md").read_text(), flags=re.MULTILINE)
    chosen = [text for text in sections if section in ("", text.partition("\n")[0])]
    return re.findall(r"```python\n(.*?)```", "".join([introduction, *chosen]), re.DOTALL)


@pytest.fixture
def run(monkeypatch):
    """Runs the blocks of a page, or of a section, in their order; returns its names."""
    meshes = []

    def run(page):
        if page == "from_jaxpp":  # of which the page says that another import is all it takes
            monkeypatch.setitem(sys.modules, "jaxpp", types.ModuleType("jaxpp"))
            monkeypatch.setattr(sys.modules["jaxpp"], "api", mpmd, raising=False)
            monkeypatch.setitem(sys.modules, "jaxpp.api", mpmd)
        names = pages.run(code_of(page))
        meshes.extend(value for value in names.values() if isinstance(value, mpmd.MpmdMesh))
        return names

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what libraries take from JAX
        yield run
    for mesh in meshes:
        mesh.close()


@pytest.mark.usual("recipes#Batch statistics")
@pytest.mark.parametrize("page", STEPS)
def test_the_step_of_a_page_computes_what_plain_jax_computes(run, page):
    step, arguments, results = STEPS[page]
    names = run(page)
    expected = eval(f"jax.jit({step})({arguments})", names)
    assert_close(eval(f"({results})", names), expected)
    compiled = eval(f"mpmd.jit({step}, mesh).compile({arguments})", names)
    assert {program.mpmd_idx for program in compiled.plan.programs if program.runs} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in STEPS if page.startswith("from_")])
def test_the_step_before_a_migration_computes_the_same(run, page):
    names = run(page)
    trained, loss = names["old_params"], names["old_loss"]
    if page == "from_pmap":  # each device has a copy
        trained, loss = jax.tree.map(lambda leaf: leaf[0], (trained, loss))
    assert_close((names["trained"], jnp.asarray(names["loss"])), (trained, loss))


@pytest.mark.slow
def test_objects_that_the_pages_make_of_results(run):
    nnx = run("models#flax nnx")
    flax = nnx["nnx"]
    flax.update((nnx["model"], nnx["optimizer"]), mpmd.to_host(nnx["trained"]))
    assert_close(flax.state((nnx["model"], nnx["optimizer"])), mpmd.to_host(nnx["trained"]))
    equinox = run("models#equinox")
    model = equinox["model"]
    expected, _ = jax.jit(equinox["train_step"])(*(equinox[name] for name in ("state", "x", "y")))
    assert_close(model(equinox["x"]), equinox["eqx"].combine(expected[0], equinox["static"])(equinox["x"]))
    sampling = run("recipes#Evaluation and sampling")
    assert_close(sampling["predictions"], sampling["network"](sampling["params"], sampling["x"]))


@pytest.mark.slow
def test_a_loss_of_the_whole_batch_takes_two_loops(run):
    names = run("recipes#Losses over the whole batch")
    weights, x = [*names["weights"]], names["x"]
    loss_of, embed = names["loss_of"], names["embed"]
    loss, grads = jax.jit(jax.value_and_grad(lambda weights: loss_of(embed(weights, x))))(weights)
    assert_close((names["trained"], names["loss"]), (names["update"](weights, grads), loss))
    programs = names["step"].compile(weights, x).plan.programs
    assert {program.mpmd_idx for program in programs if program.runs} == {0, 1}


def with_edits(page, *edits):
    """The blocks of a section, in the last of which texts are replaced as the page says."""
    *before, text = code_of(page)
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return "\n".join([*before, text])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "call", "edits"),
    [
        (
            "models#flax nnx",
            "state, x, y, jax.random.split(jax.random.key(1), len(x))",
            [
                ("self.head = ", "self.dropout = nnx.Dropout(0.1)\n        self.head = "),
                ("__call__(self, x)", "__call__(self, x, rngs)"),
                ("self.head(x)", "self.head(self.dropout(x, rngs=rngs))"),
                ("train_step(state, x, y):", "train_step(state, x, y, keys):"),
                ("loss_fn(params, x, y):", "loss_fn(params, x, y, keys):"),
                ("nnx.merge(model_graph, params)(x)", "nnx.merge(model_graph, params)(x, nnx.Rngs(keys[0]))"),
                ("grad_fn(params, x, y)", "grad_fn(params, x, y, keys)"),
                ("trained, loss = step(state, x, y)", ""),
            ],
        ),
        (
            "models#equinox",
            "state, x, y",
            [
                ("jax.vmap(layer)(x)", "layer(x)"),
                ("jax.vmap(self.head)(x)", "self.head(x)"),
                ("eqx.combine(params, static)(x)", "jax.vmap(eqx.combine(params, static))(x)"),
            ],
        ),
    ],
    ids=["dropout of nnx", "a mark under vmap"],
)
def test_what_the_last_lines_of_a_page_say_to_change(page, call, edits):
    names = {}
    exec(with_edits(page, *edits), names)
    with names["mesh"]:
        actual = eval(f"step({call})", names)
        assert_close(actual, eval(f"jax.jit(train_step)({call})", names))


def test_arrays_of_jaxpp_go_to_groups_and_back(run):
    names = run("from_jaxpp")
    assert_close(names["spread"], mpmd.to_host(names["trained"]))
    assert [array.sharding for array in names["spread"]] == names["shardings"]
    assert [array.mpmd_idxs for array in names["on_groups"]] == [(0,), (1,)]
    assert {"fwd_0__0", "bwd_1__3"} <= names["milliseconds"].keys()


def seconds_of(choice):
    """The seconds of the named rows of a choice and of its best pipeline; infinite without memory."""
    rows = {row.label: row for row in choice.rows if row.label}
    rows["pipeline"] = next(row for row in choice.rows if len(row.candidate.submeshes) > 1)
    return {
        name: row.prediction.seconds if row.prediction.memory.total <= 80e9 else math.inf
        for name, row in rows.items()
    }


@pytest.mark.slow  # `make docs` runs the page, too
def test_the_numbers_of_when_a_pipeline_pays(capsys):
    names = pages.run(pages.blocks("how_to/when_a_pipeline_pays.md"))
    one_node, fast, slow = (seconds_of(names[name]) for name in ("one_node", "fast_network", "slow_network"))
    assert one_node["data parallel"] < 1.1 * one_node["pipeline"]
    assert math.inf == fast["data parallel"] == slow["data parallel"]
    assert 2 < fast["FSDP"] / fast["pipeline"] < 0.2 * slow["FSDP"] / slow["pipeline"]
    assert capsys.readouterr().out.count("pipeline  ") == 3
