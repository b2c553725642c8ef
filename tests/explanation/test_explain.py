"""``mpmd.explain``: where the values of a step are, which tasks read and make them, and at which lines."""

import functools
import re

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support import models
from tests.support.models import (
    BATCH,
    CLIPPED_ADAM,
    MICROBATCHES,
    SGD,
    WIDTH,
    batch,
    init,
    layer,
    make_step,
    mse,
    mse_of,
    planned,
    sgd_step,
    squares,
    weights,
)
from tests.support.programs.scanned_layers import model, stacked
from tests.support.programs.sharing import language_model, tied

ACTIVATION = f"float32[{BATCH},{WIDTH}]"


def lowered(loss, params, groups, optimizer=SGD):
    """A planned step of a loss; parameters are args[0][0]..., the optimizer's state is args[0][1]..."""
    step = make_step(loss, mpmd.Std1F1B(groups), optimizer)
    return lower(step, init(params, optimizer), groups)


def lower(step, state, groups):
    return planned(step, state, *batch(), groups=groups, donate_argnums=0)


@functools.cache
def mlp_step():
    return lowered(mse, weights(3), 3, CLIPPED_ADAM)


@functools.cache
def tied_step():
    return lowered(language_model, tied(), 3)


@functools.cache
def interleaved_step():
    """Its schedule fuses forward and backward of the last stage."""
    return lower(make_step(mse, mpmd.Interleaved1F1B(4, 2)), init(weights(4)), 2)


def uses(found):
    return [(use.task, use.mpmd_idx) for use in found]


def functions(use):
    return {line.function for line in use.lines}


def edge(explanation, src, dst):
    return next(edge for edge in explanation.edges if (edge.src, edge.dst) == (src, dst))


def test_a_weight_is_where_its_stage_reads_it():
    leaf = mpmd.explain(mlp_step()).leaf("args[0][0][1]['w']")
    assert leaf.input.mpmd_idxs == leaf.output.mpmd_idxs == (1,)
    assert leaf.input.donated
    assert uses(leaf.input.read_by) == [("fwd_1", 1), ("bwd_1", 1), ("after_1", 1)]
    assert [line.function for line in leaf.input.read_by[0].lines] == ["layer"]
    assert leaf.input.read_by[0].lines[0].file == models.__file__
    assert leaf.input.updated == leaf.output.path == "result[0][0][1]['w']"
    assert leaf.output.updates == leaf.input.path


def test_a_weight_is_made_of_its_gradient_and_moments():
    output = mpmd.explain(mlp_step()).leaf("result[0][0][1]['w']").output
    assert uses(output.made_by) == [("after_1", 1)]
    assert output.made_by[0].lines[0].callee == "optax.apply_updates"
    assert set(output.arguments) == {
        "args[0][0][1]['w']",
        "args[0][1][1][0].mu[1]['w']",
        "args[0][1][1][0].nu[1]['w']",
    }
    assert uses(output.tasks) == [("bwd_1", 1)]
    assert functions(output.tasks[0]) == {"layer"}
    assert output.sent_to == ()


def test_a_tied_weight_has_an_accumulator_on_each_group_and_is_updated_on_one():
    leaf = mpmd.explain(tied_step()).leaf("args[0][0]['table']")
    assert leaf.input.mpmd_idxs == leaf.output.mpmd_idxs == (0, 2)
    loop = [use for use in leaf.input.read_by if use.in_loop]
    assert uses(loop) == [("fwd_0", 0), ("fwd_2", 2), ("bwd_2", 2)]
    assert [functions(use) for use in loop] == [{"language_model"}] * 3
    assert uses(leaf.output.tasks) == [("bwd_0", 0), ("bwd_2", 2)]
    assert uses(leaf.output.made_by) == [("after_0", 0)]
    assert leaf.output.sent_to == (2,)
    assert "is sent to group 2, where args[0][0]['table'] is" in str(leaf)


def test_the_overview_names_shared_weights():
    lines = str(mpmd.explain(tied_step())).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("shared weight"))
    assert lines[header + 1].split("  ")[0] == "args[0][0]['table']"
    assert "bwd_0 on 0; bwd_2 on 2" in lines[header + 1]
    assert lines[header + 2] == ""


def test_a_frozen_weight_is_returned_as_it_is():
    def step(state, xs, ys):
        frozen, params = state
        train = sgd_step(lambda params, x, y: mse([frozen, params], x, y), mpmd.Std1F1B(2))
        params, loss = train(params, xs, ys)
        return (frozen, params), loss

    leaf = mpmd.explain(lower(step, tuple(weights(2)), 2)).leaf("args[0][0]['w']")
    assert leaf.input.mpmd_idxs == leaf.output.mpmd_idxs == (0,)
    assert uses(leaf.input.read_by) == [("fwd_0", 0)]
    assert leaf.output.made_by == ()
    assert "is args[0][0]['w'] itself" in str(leaf)


def test_a_skip_connection_goes_straight_to_its_reader():
    def loss(params, x, y):
        a = layer(params[0], x)
        h = mpmd.mark_stage_end(a)
        h = mpmd.mark_stage_end(layer(params[1], h))
        return squares(layer(params[2], h + a), y)

    explanation = mpmd.explain(lowered(loss, weights(3), 3))
    (value,) = edge(explanation, 0, 2).values
    assert str(value.aval) == ACTIVATION
    assert value.count == MICROBATCHES
    assert value.made_by.task == "fwd_0"
    assert functions(value.made_by) == {"layer"}
    assert uses(value.read_by) == [("fwd_2", 2)]
    assert functions(value.read_by[0]) == {"loss"}


def test_a_counter_is_computed_by_every_group_and_not_sent():
    explanation = mpmd.explain(mlp_step())
    leaf = explanation.leaf("args[0][1][1][0].count")
    assert leaf.input.mpmd_idxs == (0, 1, 2)
    assert uses(leaf.output.made_by) == [("after_1", 0), ("after_1", 1), ("after_1", 2)]
    assert leaf.output.sent_to == ()
    assert "is made on each group for itself by" in str(leaf)
    assert {value.aval.dtype for edge in explanation.edges for value in edge.values} == {"float32"}


@pytest.mark.parametrize("step", [mlp_step, tied_step, interleaved_step])
def test_edges_add_up_to_what_the_report_has(step):
    edges = mpmd.explain(step()).edges
    assert all(edge.nbytes == sum(value.nbytes for value in edge.values) for edge in edges)
    for group in step().report().groups:
        assert group.sent_bytes == sum(edge.nbytes for edge in edges if edge.src == group.mpmd_idx)


def test_fused_tasks_go_by_their_names():
    leaf = mpmd.explain(interleaved_step()).leaf("args[0][0][3]['w']")
    assert uses(leaf.input.read_by) == [("FusedTask(fwd_3, bwd_3)", 1), ("after_0", 1)]
    assert uses(leaf.output.tasks) == [("FusedTask(fwd_3, bwd_3)", 1)]


def test_tasks_name_the_functions_of_the_user():
    tasks = {(task.task, task.mpmd_idx): task for task in mpmd.explain(mlp_step()).tasks}
    forward = tasks["fwd_1", 1]
    assert forward.runs == MICROBATCHES
    assert [share.line.function for share in forward.functions] == ["layer"]
    product, bias, tanh = 2 * BATCH * WIDTH * WIDTH, WIDTH + BATCH * WIDTH, BATCH * WIDTH
    assert forward.operations == product + bias + tanh
    assert forward.functions[0].equations == forward.equations
    assert "layer" in str(forward)
    shares = [share for task in tasks.values() for share in task.functions]
    callers = {share.line.function for share in shares if share.line}
    assert callers == {"layer", "squares", "step"}, "what the compiler adds is no line of its caller"
    optimizer = tasks["after_1", 0].functions
    assert all(share.line for share in optimizer)
    assert "optax.tree_update_moment" in {share.line.callee for share in optimizer}


def test_equal_tasks_of_other_lines_keep_their_lines():
    """They share an executable, which knows the lines of one of them alone."""

    def first(params, h):
        return jnp.tanh(h @ params["w"] + params["b"])

    def second(params, h):
        return jnp.tanh(h @ params["w"] + params["b"])

    loss = functools.partial(mse_of, (layer, first, second, layer))
    tasks = {task.task: task for task in mpmd.explain(lowered(loss, weights(4), 4)).tasks}
    assert tasks["fwd_1"].executable == tasks["fwd_2"].executable
    assert [share.line.function for share in tasks["fwd_1"].functions] == ["first"]
    assert [share.line.function for share in tasks["fwd_2"].functions] == ["second"]


def test_the_overview_has_one_line_for_leaves_alike():
    lines = str(mpmd.explain(mlp_step())).splitlines()
    rows = [line.split() for line in lines if line.startswith("args[0][0]")]
    size = 4 * (WIDTH * WIDTH + WIDTH)
    readers = ["fwd_0, after_1", "fwd_1, bwd_1, after_1", "fwd_2, bwd_2, after_1"]
    expected = [f"args[0][0][{i}] 2 {size} B {i} {tasks} after_1" for i, tasks in enumerate(readers)]
    assert [" ".join(row) for row in rows] == expected


def test_an_unknown_leaf_is_an_error_that_lists_close_ones():
    unknown, close = "args[0][0][1]['v']", "args[0][0][1]['w']"
    with pytest.raises(ValueError, match=f"no leaf has {re.escape(unknown)} .*{re.escape(close)}"):
        mpmd.explain(mlp_step()).leaf(unknown)


def test_a_part_of_a_name_has_to_be_unique():
    explanation = mpmd.explain(mlp_step())
    assert explanation.leaf("mu[2]['b']").paths == (
        "args[0][1][1][0].mu[2]['b']",
        "result[0][1][1][0].mu[2]['b']",
    )
    with pytest.raises(ValueError, match=r"leaves have \['w'\] in their names; say more: .* in all"):
        explanation.leaf("['w']")


def test_only_compiled_steps_can_be_explained():
    step = mpmd.jit(make_step(mse, mpmd.Std1F1B(3)), mpmd.AbstractMpmdMesh([{}] * 3))
    with pytest.raises(TypeError, match=r"step must be a planned or a compiled step, .*\.compile\("):
        mpmd.explain(step)


def test_a_leaf_says_how_it_is_sharded():
    rows = P(None, "data")
    step = sgd_step(mse, mpmd.Std1F1B(2))
    step = planned(step, weights(2), *batch(), axes={"data": 2}, in_specs=(P(), rows, rows))
    explanation = mpmd.explain(step)
    assert str(explanation.leaf("args[1]")).splitlines()[0].endswith("on group 0, sharded (None, 'data')")
    assert str(explanation.leaf("args[0][0]['w']")).splitlines()[0].endswith("on group 0")
    assert [task.runs for task in explanation.tasks if task.task == "fwd_0"] == [MICROBATCHES]


def test_parts_of_stacks():
    step = sgd_step(model(), mpmd.Std1F1B(3))
    explanation = mpmd.explain(planned(step, stacked(), *batch(), groups=3))
    lines = str(explanation).splitlines()
    (line,) = (line for line in lines if line.startswith("args[0]['layers'][2:4]"))
    assert line.split() == "args[0]['layers'][2:4] 2 160 B 1 fwd_1, bwd_1, after_0 after_0".split()
    text = str(explanation.leaf("args[0]['layers']['w'][2:4]"))
    assert "float32[2,4,4], 128 B, on group 1" in text and "fwd_1" in text
    with pytest.raises(ValueError, match=r"3 leaves have .* in their names; say more: .*\[0:2\]"):
        explanation.leaf("args[0]['layers']['w']")
