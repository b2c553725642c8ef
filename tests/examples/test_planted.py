"""Every example fails if one gradient of one weight, stage and microbatch is two per cent off."""

import pytest

from tests.examples.planted import planted

JAXPP = "--layers 4 --seq-len 4 --heads 4 --d-model 32 --steps 4".split()
ALPA = "--given --dim 8 --batch-size 32 --parts manual".split()
GPT = "--layers 2 --stages 2 --d-model 8 --heads 2 --seq-len 8 --batch-size 4 --microbatches 2 --steps 2"
TRANSFORMER = (
    "--strategies gathered --data 1 --model 1 --layers 2 --hidden 16 --heads 2 --seq-len 8 --microbatches 2 "
    "--steps 1"
).split()
STRATEGIES = [
    *"--layers 3 --d-model 16 --seq-len 8 --heads 2 --simulate 1 --strategies".split(),
    "pipeline, 1F1B",
]
WEIGHT, BIAS = max, min
WRITES = {"jaxpp_tutorial": "--output", "train_gpt": "--output", "resumable_training": "--directory"}


@pytest.mark.usual("nabla_gpipe-arguments0-2-5-max")
@pytest.mark.parametrize(
    ("name", "arguments", "stage", "microbatch", "choose"),
    [
        ("nabla_gpipe", [], 2, 5, WEIGHT),
        ("nabla_gpipe", [], 3, 0, BIAS),
        ("nabla_2d", [], 0, 3, WEIGHT),
        ("alpa_tutorial", ALPA, 1, 7, WEIGHT),
        ("alpa_tutorial", ALPA, 0, 15, BIAS),
        ("train_gpt", ["--in-process", *GPT.split()], 1, 0, BIAS),
        ("scanned_gpt", GPT.split(), 0, 1, WEIGHT),
        ("resumable_training", [], 0, 3, WEIGHT),
        ("workshop_transformer", TRANSFORMER, 0, 1, WEIGHT),
        ("workshop_transformer", TRANSFORMER, 1, 0, BIAS),
        ("workshop_strategies", STRATEGIES, 0, 1, WEIGHT),
        ("workshop_strategies", STRATEGIES, 1, 0, BIAS),
        pytest.param("jaxpp_tutorial", JAXPP, 2, 1, WEIGHT, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_gradient_is_noticed(example, tmp_path, name, arguments, stage, microbatch, choose):
    if name in WRITES:
        arguments = [*arguments, WRITES[name], str(tmp_path)]
    off = r"relative error of .* more than|differ by|does not compute what plain JAX does"
    with planted(stage, microbatch, choose) as wrong, pytest.raises(AssertionError, match=off):
        example(name).main(arguments)
    assert wrong, "the gradient was zero"
