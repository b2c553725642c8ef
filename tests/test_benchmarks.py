"""What the benchmarks measure that has to hold."""

import jax
import numpy as np
import pytest

import mpmd
from benchmarks.init_memory import measure
from benchmarks.planned_models import LargeVocabulary, Model, UNet, UnevenMLP, balanced, equal_layers
from benchmarks.predicted_choices import made_by_hand
from benchmarks.published import chosen_over_best
from benchmarks.published.facts import TORCHTITAN, typed_in
from benchmarks.published.fitted import FITTED, fitted_third
from benchmarks.published.predict import Predictor
from benchmarks.published.vtrain import NODES, ONE_NODE, read
from benchmarks.reshard import LAYERS, Copies
from mpmd.planner.cluster import Cluster


@pytest.mark.slow
def test_the_driver_holds_nothing_of_a_state_that_groups_make():
    megabytes = 64
    ours, plain = measure(megabytes, "on_groups"), measure(megabytes, "in_one_process")
    assert ours.grown < megabytes / 2
    assert plain.grown >= 3 * megabytes


def test_a_copy_of_weights_sends_the_difference_of_the_layouts():
    axes, devices = ("stage", "model"), jax.devices()
    submeshes = [
        jax.sharding.Mesh([of_group], axes) for of_group in ([devices[0]], [devices[1]], [*devices[2:4]])
    ]
    width = 4
    all_bytes = LAYERS * width * width * 4
    with mpmd.MpmdMesh(submeshes, parts={"trainer": 2, "sampler": 1}) as mesh:
        copies = Copies(mesh, width)
        moved = [copies.moved(name) for name in copies.moves]
        assert all(0 < called <= whole for whole, called in map(copies.seconds, copies.moves))
    assert [copy.sent for copy in moved] == [copy.lacking for copy in moved]
    assert [copy.sent for copy in moved] == [all_bytes, all_bytes, all_bytes, 0]


def test_steps_of_torchtitan_are_predicted():
    facts = [fact for fact in typed_in() if fact.group == TORCHTITAN]
    fitted = fitted_third(facts)
    assert len(fitted) == 4 and len(facts) == 12
    predictor = Predictor(FITTED.clusters)
    misses = [abs(predictor.seconds(fact) / fact.seconds - 1) for fact in facts if fact not in fitted]
    assert sum(misses) / len(misses) < 0.1


def test_presets_have_the_fitted_numbers():
    preset, fitted = Cluster.preset("a100-80gb"), FITTED.clusters(ONE_NODE)["a100"]
    for name in ("flops", "rates", "device_link", "collective_floor", "task_overhead", "memory_bandwidth"):
        assert getattr(preset, name) == getattr(fitted, name), name


ONE_NODE_LINES = """\
# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,\
tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)
2,8,1,64,4,4,32,1,1,2,20
2,8,1,64,4,4,32,2,1,1,10
2,8,2,64,4,4,32,2,1,1,40
"""


def test_iterations_of_vtrain_are_read_and_compared(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ground_truth_single.csv").write_text("\ufeff" + ONE_NODE_LINES, encoding="utf-8")
    header, *lines = ONE_NODE_LINES.splitlines()
    (tmp_path / "data" / "ground_truth_multi.csv").write_text(f"Parameters,{header}\n1,{lines[0]}\n")
    facts = [*read(tmp_path)]
    assert [fact.group for fact in facts] == [ONE_NODE] * 3 + [NODES]
    assert [fact.recomputed for fact in facts] == [0.0] * 3 + [1.0]
    assert facts[1].seconds == 0.01 and (facts[1].tensor, facts[1].pipeline, facts[1].microbatch) == (2, 1, 1)
    assert fitted_third(facts) == {facts[0], facts[3]}
    predicted = dict(zip(facts[:3], (2.0, 0.5, 0.1), strict=True))  # 40 ms, 5 ms and 4 ms
    assert chosen_over_best(predicted) == [4.0]


@pytest.mark.parametrize(
    "model",
    [UNet(4, 8, 4), LargeVocabulary(2, 8, 2, 4, 32, 4), UnevenMLP((4, 8, 16, 4), 4)],
    ids=lambda model: model.name,
)
def test_plans_by_hand_compute_what_the_open_step_computes(model: Model):
    plan = made_by_hand(model, 2)[-1]
    state, loss = model.open_step(model.state(), *model.batch())
    step = model.scheduled_step(plan.layers_per_stage, mpmd.ZeroBubble(2))
    submeshes = [jax.sharding.Mesh(np.array([device]), ("data",)) for device in jax.devices()[:2]]
    with mpmd.MpmdMesh(submeshes) as mesh:
        of_hand = mpmd.jit(step, mesh)(model.state(), *model.microbatches(4))
        np.testing.assert_allclose(of_hand[1], loss, rtol=1e-5)
        for leaf, expected in zip(jax.tree.leaves(of_hand[0]), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-2, atol=1e-5)


def test_layers_are_cut_by_their_amounts():
    assert equal_layers(11, 2) == (6, 5) and equal_layers(6, 4) == (2, 2, 1, 1)
    assert balanced([1, 1, 1, 1, 4], 2) == (4, 1)
    assert balanced([3, 1, 1, 1, 2], 3) == (1, 2, 2)
    assert balanced(LargeVocabulary().work(), 2) == (5, 1)
