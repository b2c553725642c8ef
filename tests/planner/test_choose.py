"""``mpmd.plan``: what it chooses computes what plain JAX computes, and says what it costs."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.planner.choice_table import candidate_text
from mpmd.planner.reasons import may_be_as_fast
from tests.support.parity import assert_close
from tests.support.planned_steps import (
    ADAM,
    CLUSTER,
    adversarial_arguments,
    adversarial_step,
    arguments,
    batch,
    layer_of,
    loss_of,
    marked_step,
    open_step,
    params_of,
    step_without_a_loop,
)
from tests.support.programs.several_loops import delayed_actor, delayed_actor_arguments


def check_computes_the_same(step, args, choice=None, **fixes):
    """Chooses, runs two steps, and compares them with plain JAX; returns the choice."""
    choice = choice or mpmd.plan(step, *args, cluster=CLUSTER, simulate=1, **fixes)
    plain, rest = jax.jit(step), args[-2:]
    first = plain(*args)
    second = plain(*first[:-1], *rest)
    with choice.mesh() as mesh:
        planned = choice.jit(mesh)
        found = planned(*args)
        assert_close(found[-1], first[-1])
        assert_close(planned(*found[:-1], *rest), second)
    return choice


@pytest.fixture(scope="module")
def open_choice():
    """The choice for a step of which nothing is fixed."""
    return mpmd.plan(open_step, *arguments(), cluster=CLUSTER, simulate=2)


def test_a_choice_as_text_page_and_data(open_choice):
    choice = open_choice
    text = str(choice)
    assert "chosen: " in text and "one device" in text and "why not" in text
    data = json.loads(choice.to_json())
    assert data["rows"][0]["candidate"]["groups"] == len(choice.candidate.submeshes)
    assert data["rows"][0]["expected_error"] == 0.05 and "±5%" in text
    assert data["cluster"]["devices_per_node"] == 8 and len(data["rows"]) == len(choice.rows)
    page = choice.to_html()
    assert page.startswith("<!doctype html>") and page.count("<tr") == len(choice.rows) + 1
    details = choice.details()
    assert details.to_html() == page and str(details).count("temporaries") == len(choice.rows)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_marked_stages_on_fewer_groups(groups):
    args = arguments(cut=True)
    choice = check_computes_the_same(marked_step, args, groups=groups, submesh={})
    assert len(choice.candidate.submeshes) == groups
    assert choice.candidate.layers_per_stage == (1, 1, 1, 1) and choice.candidate.num_microbatches == 4


def test_a_cluster_of_two_kinds_of_devices():
    fast, slow = (dataclasses.replace(CLUSTER, devices_per_node=2, kind=kind) for kind in ("fast", "slow"))
    slow = dataclasses.replace(slow, flops=CLUSTER.flops / 3, memory_bandwidth=CLUSTER.memory_bandwidth / 3)
    cluster = mpmd.Cluster.of([fast, slow], link=CLUSTER.device_link)
    args = arguments()
    fixes = {"num_microbatches": 4, "schedule": "Std1F1B", "remat": False, "simulate": 1}
    choice = mpmd.plan(open_step, *args, cluster=cluster, groups=2, submesh={"data": 2}, **fixes)
    types = choice.launch["accelerator_types"]
    assert types == json.loads(choice.to_json())["rows"][0]["candidate"]["pools"]
    layers = dict(zip(types, choice.candidate.layers_per_stage, strict=True))
    assert layers["fast"] > layers["slow"]
    assert "1 node of 2 fast devices" in str(choice) and " of slow" in str(choice)
    with choice.mesh() as mesh:
        choice.jit(mesh)
    with pytest.raises(
        ValueError, match=r"measure=1 runs tasks .* of one kind, and the cluster has fast and"
    ):
        mpmd.plan(open_step, *args, cluster=cluster, measure=1)


@pytest.mark.slow
def test_what_is_fixed_stays():
    fixes = {"remat": True, "fsdp": True, "num_microbatches": 4}
    args, submesh = arguments(), {"data": 2, "model": 2}
    choice = check_computes_the_same(open_step, args, groups=2, submesh=submesh, **fixes)
    for name, value in (fixes | {"remat": (mpmd.Remat.NOTHING_SAVEABLE,)}).items():
        assert {getattr(row.candidate, name) for row in choice.rows} == {value}
    assert choice.launch == {"groups": [{"data": 2, "sequence": 1, "model": 2}] * 2}


def test_everything_open(open_choice):
    choice = open_choice
    assert sum(choice.candidate.layers_per_stage) >= 4 and choice.examples == 16
    simulated = [row for row in choice.rows if row.prediction.source == "simulation"]
    assert choice.best is simulated[0] and not choice.best.reason
    others = [row.seconds for row in simulated[1:]]
    assert others == sorted(others)
    assert may_be_as_fast(choice.best, min(simulated, key=lambda row: row.seconds))
    assert all(row.reason for row in choice.rows[1:])
    assert {row.prediction.source: row.prediction.expected_error for row in choice.rows} == {
        "simulation": 0.05,
        "formula": 0.07,
    }


@pytest.mark.slow
def test_what_is_chosen_with_nothing_fixed_runs(open_choice):
    check_computes_the_same(open_step, arguments(), open_choice)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_three_losses_with_nothing_fixed(devices):
    def differentiate(loss):
        return lambda *args: mpmd.value_and_grad(loss, batch_argnums=len(args) - 1)(*args)

    step, (state, batch) = delayed_actor(differentiate), delayed_actor_arguments()
    cluster = dataclasses.replace(CLUSTER, devices_per_node=devices)
    choice = mpmd.plan(step, state, batch, cluster=cluster, simulate=1)
    assert len(choice.candidate.loops) == 3
    assert not any("cannot be compiled" in (row.reason or "") for row in choice.rows)
    with choice.mesh() as mesh:
        planned = choice.jit(mesh, donate_argnums=())
        assert_close(planned(state, batch), jax.jit(step)(state, batch))


@pytest.mark.slow
def test_a_loop_with_fewer_layers_than_groups_runs_on_the_first_ones():
    submesh = [{"data": 2}, {}, {}, {"model": 2}]
    args = adversarial_arguments()
    choice = check_computes_the_same(adversarial_step, args, submesh=submesh, num_microbatches=4)
    assert [loop.schedule.mpmd_dim for loop in choice.candidate.loops] == [4, 3]
    assert [sum(loop.layers_per_stage) for loop in choice.candidate.loops] == [4, 3]
    assert choice.launch["groups"] == [{"data": 1, "sequence": 1, "model": 1, **own} for own in submesh]
    formulas = [row for row in choice.rows if row.prediction.source == "formula"]
    assert all(len(row.candidate.loops) == 2 for row in choice.rows) and formulas
    assert {row.label for row in choice.rows} == {""}, "alternatives have one group"
    text = " ".join(str(choice).split())  # lines of any width
    assert "; loop 0: " in text and "; loop 1: " in text
    assert len(json.loads(choice.to_json())["rows"][0]["candidate"]["later_loops"]) == 1


def test_loops_cannot_have_more_groups_than_layers():
    with pytest.raises(ValueError, match="loop 0: groups=5 need a stage each; the step has 4 layers"):
        mpmd.plan(adversarial_step, *adversarial_arguments(), cluster=CLUSTER, groups=5)


@pytest.mark.slow
@pytest.mark.parametrize("submesh", [None, {"data": 2, "model": 2}])
def test_a_step_without_a_loop_is_shared_by_one_group(submesh):
    choice = check_computes_the_same(step_without_a_loop, arguments(), submesh=submesh, fsdp=submesh and True)
    (chosen,) = choice.candidate.submeshes
    assert chosen.num_devices == (4 if submesh else 8) and choice.examples == 16
    assert choice.in_shardings[2] == (P("data") if chosen.data > 1 else P())
    assert choice.donate_argnums == (0, 1)
    if submesh:
        assert choice.in_shardings[0][0]["up"] == P("data", "model")
        assert choice.in_shardings[1][0].mu[0]["up"] == P("data", "model")


def test_a_function_that_updates_nothing():
    def model(params, x):
        for layer in params:
            x = layer_of(layer, x)
        return x.sum(-1)

    args = params_of(), batch()[0]
    choice = mpmd.plan(model, *args, cluster=CLUSTER, submesh={"data": 4}, fsdp=True)
    assert choice.in_shardings[1] == P("data"), "the rows of the batch depend on nothing else"
    assert choice.in_shardings[0][0]["up"] == P(None, "data") and choice.donate_argnums == ()
    with choice.mesh() as mesh:
        assert_close(choice.jit(mesh)(*args), model(*args))


def test_specs_that_the_user_gives_stay():
    weights = [{"up": P("data"), "bias": None, "down": None}] * 2
    choice = mpmd.plan(
        open_step,
        *arguments(num_layers=2),
        cluster=CLUSTER,
        in_shardings=(weights, None, P("data"), P("data")),
        groups=1,
        submesh={"data": 8},
        fsdp=False,
        simulate=1,
    )
    params, state, x, _ = choice.in_shardings
    assert params[0]["up"] == P("data") and params[0]["down"] == P() and x == P("data")
    assert state[0].mu[0]["up"] == P("data"), "what the optimizer keeps is sharded like the weight"


@pytest.mark.slow
def test_what_is_measured_comes_first():
    args = arguments(num_layers=2)
    fixes = {"groups": 2, "submesh": {}, "num_microbatches": 4, "remat": False}
    choice = mpmd.plan(open_step, *args, cluster=CLUSTER, **fixes, simulate=2, measure=1)
    sources = [row.prediction.source for row in choice.rows if row.prediction.source != "formula"]
    assert sources[0] == "measurement" and len(sources) == 2
    assert choice.best.prediction.seconds > 0 and choice.simulation.makespan > 0


def test_static_arguments_and_arguments_by_name():
    def step(params, state, kind, x, *, y):
        assert kind == "mean"
        return open_step(params, state, x, y)

    params, state, x, y = arguments(num_layers=2)
    fixes = {"num_microbatches": 2, "remat": False, "groups": 2, "submesh": {"data": 2}, "simulate": 1}
    args, options = (params, state, "mean", x), {"kwargs": {"y": y}, "static_argnums": 2}
    choice = mpmd.plan(
        step, *args, cluster=CLUSTER, schedule=mpmd.Std1F1B, layers_per_stage=[1, 1], **options, **fixes
    )
    assert choice.kwarg_shardings == {"y": P("data")} and choice.in_shardings[2] == P("data")
    assert choice.donate_argnums == (0, 1)
    expected = jax.jit(step, static_argnums=2)(params, state, "mean", x, y=y)
    with choice.mesh() as mesh:
        assert_close(choice.jit(mesh)(params, state, "mean", x, y=y), expected)


def test_a_mesh_of_other_groups(open_choice):
    with pytest.raises(ValueError, match="the choice is for groups of the shapes"):
        open_choice.jit(mpmd.AbstractMpmdMesh({"stage": 3}, "stage"))
    with pytest.raises(ValueError, match="and there are 1: plan for a cluster that has as many"):
        open_choice.mesh(jax.devices()[:1])


def test_groups_of_several_nodes_have_several_processes():
    cluster = dataclasses.replace(CLUSTER, nodes=2, devices_per_node=2)
    args, fixes = arguments(num_layers=2), {"num_microbatches": 1, "remat": False, "fsdp": False}
    choice = mpmd.plan(open_step, *args, cluster=cluster, groups=1, submesh={"data": 4}, **fixes)
    assert choice.launch["processes_per_group"] == [2]


def test_a_custom_schedule_says_the_number_of_microbatches():
    schedule = mpmd.CustomSchedule(mpmd.Std1F1B(2).tasks(4))
    step, args = mpmd.value_and_grad(loss_of, schedule=schedule), (params_of(2), *batch())
    planned = functools.partial(mpmd.plan, step, *args, cluster=CLUSTER, schedule=schedule, simulate=1)
    assert planned().candidate.num_microbatches == 4
    with pytest.raises(ValueError, match="has 4 microbatches, and microbatches were fixed to 8"):
        planned(num_microbatches=8)


def test_what_a_plan_guesses_is_in_the_table():
    def step(weight, x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ weight), (0, x))[1]

    arguments = [jax.ShapeDtypeStruct((16, 16), "float32")] * 2
    choice = mpmd.plan(step, *arguments, cluster=CLUSTER)
    assert "a while loop counts as one iteration" in choice.notes
    known = mpmd.plan(mpmd.cost(step, operations=1e4), *arguments, cluster=CLUSTER)
    assert "a while loop counts as one iteration" not in known.notes


@pytest.mark.parametrize("is_kernel", [False, True])
def test_plain_attention_that_takes_long_is_noted(is_kernel):
    def step(weight, x):
        return jax.nn.dot_product_attention(x @ weight, x, x, is_causal=True)

    shapes = (8, 8), (2, 64, 2, 8)
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    cluster = dataclasses.replace(CLUSTER, flash_attention=is_kernel)
    notes = mpmd.plan(step, *arguments, cluster=cluster).notes
    assert any("plain attention takes" in note for note in notes) != is_kernel


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_softmax_of_batched_products_is_attention_and_a_softplus_is_not(dtype):
    def masked(scores):
        return jax.nn.softmax(scores, where=jnp.tri(*scores.shape[1:], dtype=bool))

    def step(activation, weights, x):
        return activation(jnp.einsum("ebd,edf->ebf", x, weights))

    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, 8, 64), (4, 64, 8))]
    for activation in (jax.nn.softmax, masked, jax.nn.softplus):
        notes = mpmd.plan(functools.partial(step, activation), *arguments, cluster=CLUSTER).notes
        assert any("plain attention takes" in note for note in notes) == (activation is not jax.nn.softplus)


def test_layers_that_print_are_planned_under_remat():
    def loss(params, x, y):
        for layer in params:
            jax.debug.print("{}", x[0, 0])
            x = layer_of(layer, x)
        return jnp.mean((x - y) ** 2)

    def step(params, x, y):
        return mpmd.value_and_grad(loss)(params, x, y)

    args = params_of(4), *batch()
    assert mpmd.plan(step, *args, cluster=CLUSTER, groups=2, remat=True, simulate=1).best.candidate.remat


@pytest.mark.usual("H100")
@pytest.mark.parametrize("kind", ["H100", "TPU-V6E"])
def test_groups_that_need_more_memory_than_jax_takes_get_it(kind, monkeypatch):
    args, fixes = arguments(num_layers=2), {"num_microbatches": 1, "submesh": {}, "groups": 1}
    needed = mpmd.plan(open_step, *args, cluster=CLUSTER, **fixes).best.prediction.memory.total
    full = dataclasses.replace(CLUSTER, kind=kind, memory=needed / 0.85)
    choice = mpmd.plan(open_step, *args, cluster=full, **fixes)
    variables = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    assert choice.launch.get("runtime_env") == (None if kind.startswith("TPU") else {"env_vars": variables})
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    assert "runtime_env" not in choice.launch


@pytest.mark.parametrize(
    ("error", "given", "message"),
    [
        (TypeError, {"cluster": 8}, "cluster must be an mpmd.Cluster"),
        (TypeError, {"groups": 0, "remat": 1}, "groups must be a whole number.*\nremat must be True"),
        (
            ValueError,
            {"schedule": "1F1B"},
            "not '1F1B': did you mean Std1F1B or Eager1F1B or Interleaved1F1B",
        ),
        (ValueError, {"schedule": "zerobuble"}, "schedule must be a schedule.*did you mean ZeroBubble"),
        (ValueError, {"num_stages": 9}, r"the step has 4 \(layer 0: args\[0\]\[0\] to .*planned_steps.py"),
        (ValueError, {"submesh": {"expert": 2}}, "along the axes data, model, sequence"),
        (ValueError, {"submesh": [{"data": 2}, 2]}, "a list with one of these for each group"),
        (ValueError, {"layers_per_stage": (0, 4)}, r"layers_per_stage\[0\] must be"),
        (ValueError, {"measure": -1}, "measure must be a whole number of at least 0"),
        (ValueError, {"memory_margin": 1}, "memory_margin must be less than 1, not 1"),
        (TypeError, {"memory_margin": "8%"}, "memory_margin must be a share of the memory"),
        (ValueError, {"in_shardings": P("expert")}, "expert"),
    ],
)
def test_bad_input(error, given, message):
    with pytest.raises(error, match=f"(?s){message}"):
        mpmd.plan(open_step, *arguments(), **{"cluster": CLUSTER, "simulate": 1, **given})


def test_a_batch_of_one_row_is_not_cut():
    params = params_of(2)
    args = params, ADAM.init(params), *batch(1)
    choice = mpmd.plan(open_step, *args, cluster=CLUSTER, groups=1, submesh={}, simulate=1)
    assert {row.candidate.num_microbatches for row in choice.rows} == {1} and choice.examples == 1
    with pytest.raises(ValueError, match="num_microbatches=2 does not divide the 1 rows of the batch"):
        mpmd.plan(open_step, *args, cluster=CLUSTER, num_microbatches=2)


def test_rows_that_depend_on_one_another_are_cut_and_not_divided():
    def step(params, x):
        def loss_of(params, x):
            return jax.lax.scan(lambda carry, row: (carry + row, row * carry), x[0], x)[1].mean()

        loss, grads = mpmd.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    choice = mpmd.plan(step, jnp.ones(3), jnp.ones((4, 6)), cluster=CLUSTER, submesh={}, simulate=1)
    assert choice.examples == 4
    assert {row.candidate.num_microbatches for row in choice.rows} <= {1, 2, 4}


@pytest.mark.usual("none-of_the_batch", "unused-constant_in_a_loop")
@pytest.mark.parametrize(
    ("loss_of", "number"),
    [
        (lambda params, x: jnp.mean(x), 2),
        (lambda params, x: 3.0, 1),
        (lambda params, x: jax.lax.fori_loop(0, 3, lambda i, total: 1.0, x.sum()), 2),
    ],
    ids=["of_the_batch", "constant", "constant_in_a_loop"],
)
@pytest.mark.parametrize("params", [{}, {"w": 1.0}], ids=["none", "unused"])
def test_a_loss_without_parameters(loss_of, number, params):
    def step(params, x):
        loss, grads = mpmd.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    fixes = {"groups": 1, "submesh": {}, "num_microbatches": number, "remat": False}
    choice = mpmd.plan(step, params, jnp.ones((4, 8)), cluster=CLUSTER, simulate=1, **fixes)
    assert choice.best.prediction.source == "simulation"


def test_a_step_without_work_takes_no_time():
    choice = mpmd.plan(lambda x: x, jnp.ones((4, 8)), cluster=CLUSTER, simulate=2)
    assert choice.best.prediction.seconds == choice.best.prediction.communication == 0
    assert "0 µs" in str(choice)


def test_a_share_of_the_memory_stays_free():
    args = arguments(num_layers=2)
    fixes = {"groups": 1, "submesh": {}, "num_microbatches": 1, "remat": False}
    needed = mpmd.plan(open_step, *args, cluster=CLUSTER, **fixes).best.prediction.memory.total
    just_enough = dataclasses.replace(CLUSTER, memory=1.05 * needed)
    choice = mpmd.plan(open_step, *args, cluster=just_enough, memory_margin=0.04, **fixes)
    text = " ".join(str(choice).split())  # whose lines are as long as the terminal's
    assert choice.cluster.memory == 1.05 * needed and "of which 4% stay free" in text
    assert "±8% on a device of group 0" in text and "the step may not fit" in text
    with pytest.raises(ValueError, match=r"(?s)needs .*memory_margin=0.08 leaves .* free, of the"):
        mpmd.plan(open_step, *args, cluster=just_enough, **fixes)


def test_a_choice_that_may_not_fit_names_a_row_that_does(open_choice):
    planned = [row for row in open_choice.rows if row.prediction.source == "simulation"]
    least, *_, most = sorted(planned, key=lambda row: row.prediction.memory.total)
    memory = most.prediction.memory.total / (1 - open_choice.memory_margin)
    cluster = dataclasses.replace(open_choice.cluster, memory=memory)
    text = " ".join(str(dataclasses.replace(open_choice, rows=(most, least), cluster=cluster)).split())
    assert f"may not fit; {candidate_text(least.candidate)} needs" in text


def test_steps_that_are_none():
    with pytest.raises(TypeError, match="step must be a function, not 3"):
        mpmd.plan(3, cluster=CLUSTER)
    with pytest.raises(TypeError, match=r"not what mpmd\.jit has made of it"):
        mpmd.plan(mpmd.jit(open_step, mpmd.AbstractMpmdMesh([{}])), cluster=CLUSTER)


def test_a_step_with_kernels_of_numbers_runs_as_chosen():
    """The identities around kernels are in the programs of stages, in scans and under rematerialisation."""

    def function(x, weight):
        return jnp.tanh(x @ weight)

    numbers = {"operations": 1e6, "backward_operations": 2e6, "dimensions": "ab,bc->ac", "divides": "a"}
    layer = mpmd.cost(function, **numbers)

    def loss(params, x, y):
        for weight in params:
            x = jax.checkpoint(layer)(x, weight)
        return jnp.mean((jax.lax.map(lambda row: layer(row[None], params[0])[0], x) - y) ** 2)

    def step(params, x, y):
        value, grads = mpmd.treduce(
            lambda rows: jax.value_and_grad(mpmd.auto_marks(loss))(params, *rows),
            mpmd.microbatches((x, y)),
            schedule=mpmd.Std1F1B(2),
            operation=mpmd.Mean,
        )
        return jax.tree.map(lambda weight, grad: weight - 0.1 * grad, params, grads), value

    args = [jnp.eye(8) for _ in range(4)], jnp.ones((4, 8)), jnp.zeros((4, 8))
    check_computes_the_same(step, args, groups=2, submesh={}, num_microbatches=2, remat=False)
