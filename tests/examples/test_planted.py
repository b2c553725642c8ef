"""Every example fails if one gradient of one weight, stage and microbatch is two per cent off."""

import pytest

from tests.support.planted import planted

JAXPP = "--seq-len 4 --heads 4 --d-model 32 --steps 4".split()
ALPA = "--given --dim 8 --batch-size 32 --parts manual".split()


@pytest.mark.parametrize("choose", [max, min], ids=["weight", "bias"])
@pytest.mark.parametrize(
    ("name", "arguments", "stage", "microbatch"),
    [
        ("nabla_gpipe", [], 2, 5),
        ("nabla_2d", [], 0, 3),
        ("alpa_tutorial", ALPA, 1, 7),
        ("jaxpp_tutorial", JAXPP, 3, 2),
    ],
)
def test_a_wrong_gradient_is_noticed(example, tmp_path, name, arguments, stage, microbatch, choose):
    if name == "jaxpp_tutorial":
        arguments = [*arguments, "--output", str(tmp_path)]
    with planted(stage, microbatch, choose) as wrong, pytest.raises(AssertionError, match="relative error|differ by"):
        example(name).main(arguments)
    assert wrong, "the gradient was zero"
