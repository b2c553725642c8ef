"""``mpmd schedule``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpmd.cli.arguments import ExitCode
from mpmd.schedules import ALL_FAMILIES, CustomSchedule, Std1F1B, to_text
from mpmd.util.guarded_files import MOST_TEXT_BYTES

ROOT = Path(__file__).parents[2]

SHOWN = """\
Std1F1B: 2 groups, 2 stages, 3 microbatches

0  F0 F1 .  .  B0--- F2 B1--- .  B2---
1  .  F0 B0--- F1 B1--- F2 B2--- .  .

makespan 12, bubble 25.0%, peak memory 2, period 12

group  stages   busy  peak  longest idle
    0  0       75.0%     2  2 from 2 on: waits for bwd_1__0 of group 1
    1  1       75.0%     1  2 from 10 on: nothing left to do
"""

COMPARED = """\
4 groups, 8 microbatches

    schedule               stages  makespan  bubble  period  memory
 1  ZeroBubbleV                 8      25.5    5.9%      24       4
 2  InterleavedZeroBubble       8      25.5    5.9%    25.5       4
 3  ZeroBubble                  4        27   11.1%      27       4
"""


def test_show(command):
    code, out, err = command("schedule show std1f1b --groups 2 --microbatches 3")
    assert (code, out, err) == (0, SHOWN, "")


def test_show_takes_times_and_a_latency(command):
    times = "--fwd 2 --bwd-a 2 --bwd-w 1 --latency 0.5"
    _, out, _ = command(f"schedule show ZeroBubble --groups 2 --microbatches 1 {times}")
    assert "0  F0----- . . . . . . . . . . A0----- W0-\n" in out
    assert "makespan 10, " in out


def test_show_has_sizes_of_its_own(command):
    for arguments, size in (
        ("GPipe", "4 groups, 4 stages, 8 microbatches"),
        ("Interleaved1F1B --stages 12", "6 groups, 12 stages, 12 microbatches"),
        ("Interleaved1F1B --stages 12 --groups 4", "4 groups, 12 stages, 8 microbatches"),
        ("ForwardOnly --groups 2", "2 groups, 2 stages, 4 microbatches"),
    ):
        _, out, _ = command(f"schedule show {arguments}")
        assert out.splitlines()[0] == f"{arguments.split()[0]}: {size}"


def test_show_writes_lists_and_traces(command, tmp_path):
    paths = [tmp_path / name for name in ("lists.csv", "lists.txt", "trace.json")]
    outputs = " ".join(f"-o {path}" for path in paths)
    assert command(f"schedule show Std1F1B --groups 2 --microbatches 3 {outputs}")[0] == 0
    assert CustomSchedule.from_file(paths[0]).tasks(3) == Std1F1B(2).tasks(3)
    assert CustomSchedule.from_file(paths[1]).tasks(3) == Std1F1B(2).tasks(3)
    names = [entry["name"] for entry in json.loads(paths[2].read_text())["traceEvents"]]
    assert names.count("bwd_1__2") == 1


def test_show_and_compare_draw(command, tmp_path):
    pytest.importorskip("matplotlib")
    size = "--groups 2 --microbatches 4"
    command(f"schedule show GPipe {size} -o {tmp_path}/gpipe.svg")
    command(f"schedule compare {size} -o {tmp_path}/page.svg")
    assert ">GPipe</text>" in (tmp_path / "gpipe.svg").read_text()
    assert ">GPipe, 2 stages</text>" in (tmp_path / "page.svg").read_text()


def test_show_prints_and_checks_a_file(command, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_text(Std1F1B(2).tasks(3), "csv"))
    _, out, _ = command("schedule show", path)
    assert out == SHOWN.replace("Std1F1B", "mine.csv")
    code, out, err = command(f"schedule show {path} --groups 2")
    assert (code, out) == (2, "")
    assert err == (
        "mpmd: error: a file has its own size: leave out --groups, --stages, --microbatches and --slices\n"
    )


def test_compare(command):
    code, out, err = command("schedule compare --groups 4 --microbatches 8")
    assert (code, err) == (0, "")
    assert out.startswith(COMPARED)
    assert len(out.splitlines()) == 3 + 15


def test_compare_with_a_limit(command):
    _, out, _ = command("schedule compare --groups 4 --microbatches 8 --memory-limit 3")
    within, rest = out.split("over the limit of 3:\n")
    over, left_out = rest.split("left out:\n")
    assert "VHalf" in within
    assert "GPipe" in over
    assert left_out.startswith("   ZeroBubbleH2 keeps at least as many microbatches in flight")


def test_check(command, tmp_path):
    good, stuck, no_tasks = (tmp_path / name for name in ("good.txt", "stuck.txt", "no_tasks.txt"))
    good.write_text("F0 F1 B0 B1\nF0 B0 F1 B1\n")
    stuck.write_text("F0 B0\nB0 F0\n")
    no_tasks.write_text("F0 B0 X0\nF0 B0\n")
    code, out, err = command("schedule check", good)
    figures = "2 groups, 2 stages, 2 microbatches: makespan 9, bubble 33.3%, peak memory 2"
    assert (code, out, err) == (0, f"{good}: OK: {figures}\n", "")
    code, out, err = command("schedule check", good, stuck, no_tasks)
    assert (code, err) == (1, "")
    assert f"{good}: OK" in out
    assert f"{stuck}: the schedule cannot run" in out
    assert "1  B0[1]  F0[1]" in out
    assert f"{no_tasks}: line 1, column 7: 'X0' is not a task" in out


def test_a_file_that_cannot_run_is_shown_to_be_so(command, tmp_path):
    path = tmp_path / "stuck.txt"
    path.write_text("F0 B0\nB0 F0\n")
    code, out, err = command("schedule show", path)
    assert (code, out) == (1, "")
    assert "1  B0[1]  F0[1]" in err


def test_list(command):
    _, out, _ = command("schedule list")
    lines = out.splitlines()
    assert lines[0].split() == ["schedule", "stages", "per", "group"]
    assert [line.split()[:2] for line in lines if line.startswith(("Std1F1B", "VHalf"))] == [
        ["Std1F1B", "1"],
        ["VHalf", "2"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show Std2F2B", "'Std2F2B' is no file, and no family of schedules; these are GPipe, "),
        ("show GPipe --groups 4 --stages 5", "mpmd_dim=4 takes num_stages=4, got num_stages=5"),
        ("show GPipe --groups 0", "'0' is not a whole number of at least 1"),
        (f"show GPipe --latency {2**80}", "the most are 1000000: draw the timeline"),
        ("show GPipe --fwd -1", "'-1' is not a number from 0 to"),
        ("show GPipe --latency nan", "'nan' is not a number from 0 to"),
        ("show GPipe -o picture.doc", "'picture.doc' has none of the extensions .svg, .png, .pdf"),
        ("show GPipe -o /no/such/directory/lists.csv", "is no file in a directory that exists"),
        ("check /no/such/file.csv", "No such file or directory"),
        ("compare --groups 4", "required: --microbatches"),
        ("", "required: VERB"),
    ],
)
def test_wrong_usage_is_one_line(command, arguments, message):
    code, _, err = command(f"schedule {arguments}")
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert sum(not line.startswith(("usage:", " ")) for line in err.splitlines()) == 1


def test_the_docs_show_what_is_printed_and_drawn(command):
    docs = (ROOT / "docs" / "schedules.md").read_text()
    assert SHOWN in docs
    _, compared, _ = command("schedule compare --groups 8 --microbatches 32")
    assert compared in docs
    for name in ALL_FAMILIES:
        assert f"### {name}\n" in docs
    for picture in re.findall(r"\]\((schedules/[^)]*)\)", docs):
        assert (ROOT / "docs" / picture).exists()


SLICED = """\
Seq1F1B: 2 groups, 2 stages, 2 slices, 1 microbatch

0  F0s0 F0s1 .    .    .    B0s1----- B0s0-----
1  .    F0s0 F0s1 B0s1----- B0s0----- .    .
"""


def test_slices_are_shown_compared_and_read_back(command, tmp_path):
    path = tmp_path / "sliced.csv"
    size = "--groups 2 --microbatches 1 --slices 2"
    _, out, _ = command(f"schedule show Seq1F1B {size} -o {path}")
    assert out.startswith(SLICED)
    assert "waits for bwd_1__0s1 of group 1" in out
    _, out, _ = command("schedule check", path)
    assert out.startswith(f"{path}: OK: 2 groups, 2 stages, 2 slices, 1 microbatch: ")
    _, out, _ = command(f"schedule compare {size}")
    assert "Seq1F1B of 2 slices, split" in out and "GPipe of 2 slices" in out
    code, _, err = command(f"schedule show Std1F1B {size}")
    assert code == 2 and "Std1F1B does not cut microbatches into slices" in err


def test_the_code_of_the_docs_runs(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    docs = (ROOT / "docs" / "schedules.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", docs, re.DOTALL)
    # Dataclasses look their module up.
    namespace = {"__name__": __name__}
    for block in blocks:
        exec(block, namespace)
    assert "1  . . . . . F0----- B0------" in capsys.readouterr().out
    assert (tmp_path / "picture.svg").exists()


def test_a_grid_is_cut_to_the_terminal(command, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "24")
    _, out, _ = command("schedule show Std1F1B --groups 2 --microbatches 3")
    assert "0  F0 F1 .  .  B0--- F2 \n1  .  F0 B0--- F1 B1--- \n\n0  B1--- .  B2---\n" in out
    _, out, _ = command("schedule show GPipe --groups 8 --microbatches 64")
    assert "-o FILE.svg draws it" in out


def test_as_a_module_and_with_a_reader_that_has_had_enough():
    command = [sys.executable, "-m", "mpmd", "schedule", "list"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as closed:
        broken = subprocess.run(
            command, cwd=ROOT, env=buffered, stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (broken.returncode, broken.stderr) == (0, "")


def test_check_goes_on_after_a_file_that_cannot_be_read(command, tmp_path):
    good = tmp_path / "good.csv"
    good.write_bytes(b"\xef\xbb\xbf0F0,0B0\n")  # as spreadsheets save it
    code, out, err = command("schedule check", tmp_path / "none.csv", good)
    assert code == 2 and "good.csv: OK" in out and "none.csv: No such file" in err


@pytest.mark.parametrize("output", ["nowhere/out.svg", "."])
def test_an_output_that_cannot_be_written_is_refused_first(command, output, tmp_path):
    code, out, _ = command("schedule show GPipe -o", tmp_path / output)
    assert code == 2 and "makespan" not in out


def test_a_file_that_may_never_end_is_refused(command, tmp_path):
    pipe, large = tmp_path / "pipe", tmp_path / "large.txt"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(MOST_TEXT_BYTES + 1)
    code, _, err = command("schedule check /dev/zero", pipe, large)
    errors = err.splitlines()
    assert code == ExitCode.USAGE
    assert ["no regular file" in line for line in errors] == [True, True, False]
    assert "more than 16 MiB" in errors[2]
    with pytest.raises(OSError, match="no regular file"):
        CustomSchedule.from_file(pipe)


def test_names_of_files_are_printed_without_control_characters(command, tmp_path):
    good, bad = tmp_path / "good\x1b[2J.csv", tmp_path / "bad\x1b[2J.csv"
    good.write_text("0F0,0B0\n")
    bad.write_text("0F0\x1b[2J,0B0\n")
    results = [
        command("schedule check", good, bad, tmp_path / "none\x1b.csv"),
        command("schedule show", good),
        command("schedule show", bad),
    ]
    assert [code for code, _, _ in results] == [ExitCode.USAGE, ExitCode.OK, ExitCode.FAULT]
    printed = results[0][1]
    assert "good\\x1b[2J.csv: OK" in printed and "bad\\x1b[2J.csv: " in printed
    assert not any("\x1b" in out + err for _, out, err in results)


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("{0}F0 {0}B0", "num_stages is more than 10**18"),
        ("F0s{0} B0s{0}", "slices is more than 10**18"),
        ("F{0} B{0}", "missing: fwd_0__0"),
    ],
)
def test_a_size_that_no_schedule_has_is_named(command, cell, said, tmp_path):
    path = tmp_path / "large.txt"
    path.write_text(cell.format(2**80))
    code, out, _ = command("schedule check", path)
    assert code == ExitCode.FAULT and said in out


@pytest.mark.parametrize("option", ["--groups", "--stages", "--microbatches", "--slices"])
def test_an_option_with_a_size_that_no_schedule_has_is_named(command, option):
    code, _, err = command(f"schedule show GPipe {option} {2**80}")
    assert code == ExitCode.USAGE and "must be at most" in err
