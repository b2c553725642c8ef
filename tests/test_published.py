"""Predictions of steps that others have published."""

import pytest

from benchmarks.published import chosen_over_best, typed_in
from benchmarks.published.facts import Model
from benchmarks.published.fit import MOST
from benchmarks.published.fitted import FITTED, fitted_third
from benchmarks.published.gpus import TORCHTITAN
from benchmarks.published.model import profile_of
from benchmarks.published.predict import Predictor
from benchmarks.published.tpus import MAXTEXT, TPUS
from benchmarks.published.vtrain import NODES, ONE_NODE, read
from mpmd.planner.cluster import Cluster


@pytest.mark.slow
def test_steps_of_torchtitan_are_predicted():
    facts = [fact for fact in typed_in() if fact.group == TORCHTITAN]
    fitted = fitted_third(facts)
    assert len(fitted) == 4 and len(facts) == 12
    predictor = Predictor(FITTED.clusters)
    misses = [abs(predictor.seconds(fact) / fact.seconds - 1) for fact in facts if fact not in fitted]
    assert sum(misses) / len(misses) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("device", "count"), [("v5e", 4), ("v5p", 9), ("v6e", 13)])
def test_steps_of_tpus_are_predicted(device, count):
    facts = [fact for fact in typed_in() if fact.group == MAXTEXT[device]]
    others = [fact for fact in facts if fact not in fitted_third(facts)]
    assert len(facts) == count and len(others) == 2 * count // 3
    predictor = Predictor(FITTED.clusters)
    misses = [abs(predictor.seconds(fact) / fact.seconds - 1) for fact in others]
    assert sum(misses) / len(misses) < 0.1


def test_what_a_backward_of_maxtext_computes_again_follows_from_what_it_keeps():
    shares = {fact.model.width: fact.recomputed for fact in typed_in() if fact.group == MAXTEXT["v5p"]}
    assert 0 < shares[8192] < 0.05 < 0.5 < shares[16384] < 1  # attention alone; all but the last product


@pytest.mark.slow
def test_models_of_megatron_share_their_embedding():
    tied = profile_of(Model(4, 64, 2, 32, vocabulary=128))
    apart = profile_of(Model(4, 64, 2, 32, vocabulary=128, attention="flash"))
    assert apart.tied == () and tied.tied == (((0, 5), 128 * 64 * 2),)
    # Softmax, dropout, and the additions with dropout are kernels of their own.
    assert tied.layers[1].forward.kernels > apart.layers[1].forward.kernels


def test_presets_have_the_fitted_numbers():
    preset, fitted = Cluster.preset("a100-80gb"), FITTED.clusters(ONE_NODE)["a100"]
    for name in ("flops", "rates", "device_link", "collective_floor", "task_overhead", "memory_bandwidth"):
        assert getattr(preset, name) == getattr(fitted, name), name


@pytest.mark.parametrize("name", TPUS)
def test_presets_of_tpus_have_the_fitted_numbers(name):
    preset, fitted = Cluster.preset(name), FITTED.clusters(MAXTEXT[name])[name]
    same = (
        "flops",
        "rates",
        "memory",
        "devices_per_node",
        "collective_floor",
        "task_overhead",
        "kernel_floor",
    )
    for field in same:
        assert getattr(preset, field) == getattr(fitted, field), field
    assert preset.memory_bandwidth == pytest.approx(fitted.memory_bandwidth, rel=0.01)
    for field in ("device_link", "node_link"):
        bandwidths = (getattr(cluster, field).bandwidth for cluster in (preset, fitted))
        assert next(bandwidths) == pytest.approx(next(bandwidths), rel=0.01), field


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


def test_no_rate_is_fitted_above_its_datasheet():
    for name, most in MOST.items():
        assert getattr(FITTED, name) <= most, name
