"""Predictions of steps that others have published."""

import pytest

from benchmarks.published import chosen_over_best, typed_in
from benchmarks.published.facts import Model
from benchmarks.published.fitted import fitted_third, presets
from benchmarks.published.gpus import TORCHTITAN
from benchmarks.published.model import profile_of
from benchmarks.published.predict import Predictor
from benchmarks.published.tpus import MAXTEXT
from benchmarks.published.vtrain import NODES, ONE_NODE, read


def misses(group, device):
    """The misses of the steps of a table on a device to which no rate is fitted."""
    facts = [fact for fact in typed_in() if (fact.group, fact.device) == (group, device)]
    predictor = Predictor(presets())
    held_out = [fact for fact in facts if fact not in fitted_third(facts)]
    return [abs(predictor.seconds(fact) / fact.seconds - 1) for fact in held_out]


@pytest.mark.slow
def test_steps_of_megatron_are_predicted_by_the_preset():
    of_table = misses("Megatron-LM, 1.7B to 1T", "a100")
    assert len(of_table) == 10 and max(of_table) < 0.12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "device", "count"),
    [
        (TORCHTITAN, "a100", 8),
        (TORCHTITAN, "h100", 2),
        (MAXTEXT["v5e"], "v5e", 2),
        (MAXTEXT["v5p"], "v5p", 6),
        (MAXTEXT["v6e"], "v6e", 8),
    ],
)
def test_steps_that_divide_weights_are_predicted_by_the_presets(group, device, count):
    of_table = misses(group, device)
    assert len(of_table) == count and sum(of_table) / count < 0.16


def test_what_a_backward_of_maxtext_computes_again_follows_from_what_it_keeps():
    shares = {fact.model.width: fact.recomputed for fact in typed_in() if fact.group == MAXTEXT["v5p"]}
    assert 0 < shares[8192] < 0.05 < 0.5 < shares[16384] < 1  # attention alone; all but the last product


@pytest.mark.slow
def test_models_of_megatron_share_their_embedding():
    tied = profile_of(Model(4, 64, 2, 32, vocabulary=128))
    apart = profile_of(Model(4, 64, 2, 32, vocabulary=128, attention="flash"))
    assert apart.tied == () and tied.tied == (((0, 5), 128 * 64 * 2),)


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
    assert fitted_third(facts) == {facts[3]}
    predicted = dict(zip(facts[:3], (2.0, 0.5, 0.1), strict=True))  # 40 ms, 5 ms and 4 ms
    assert chosen_over_best(predicted) == [4.0]
