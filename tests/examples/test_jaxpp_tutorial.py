"""JaxPP's tutorial: the example, and that its checks notice what they are for."""

import json

import pytest

SMALL = "--seq-len 8 --heads 4 --d-model 32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "num_stages"),
    [("--layers 4 --data 2 --steps 4", {4}), ("", {4, 8})],
    ids=["four layers", "eight layers"],
)
def test_the_example(example, capsys, tmp_path, arguments, num_stages):
    example("jaxpp_tutorial").main(f"{SMALL} {arguments} --output {tmp_path}".split())
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    for number in num_stages:
        assert f"{number} stages on 4 groups" in lines
        assert json.loads((tmp_path / f"timeline_of_{number}_stages.json").read_text())["traceEvents"]
    runs = 1 + len(num_stages)
    for text in ("Training took: ", "Final training loss: "):
        assert printed.count(text) == runs
    assert printed.count("Training loss after step 4: ") == (runs if "--steps" not in arguments else 0)
    for name in ("losses", "gradients (mu)", "gradients (nu)", "parameters"):
        assert printed.count(f"{name}: largest relative error of a leaf") == len(num_stages)
    assert printed.count("that is the tutorial's list") == 2 * len(num_stages)
    assert printed.count("copy on group 3: ") == 2 * len(num_stages)
    around = printed[printed.index(" = run fwd_0__0 ") :]
    assert "\n  send fwd_0__0." in around and "\n  free fwd_0__0." in around
    assert len([*tmp_path.glob("tutorial-trace/plugins/profile/*/*.xplane.pb")]) == runs
    rows = printed[printed.index("\nseconds for ") :].splitlines()[2:]
    assert [row.rsplit(maxsplit=1)[0].strip() for row in rows] == [
        "FSDP by jax.jit",
        *(f"{number} stages" for number in sorted(num_stages)),
    ]
    assert all(float(row.split()[-1]) > 0 for row in rows)


def test_fsdp_needs_what_divides(example, capsys):
    for arguments in ("--heads 2", "--steps 3"):
        with pytest.raises(SystemExit, match="2"):
            example("jaxpp_tutorial").parse_arguments(arguments.split())
    assert "--steps must be at least 4" in capsys.readouterr().err
