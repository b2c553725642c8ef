"""The command ``mpmd top``, over a program that stands for the reader of a cluster."""

import json
import os
import pty
import subprocess
import sys
import threading

import pytest

from mpmd.cli import main, top
from mpmd.cli.exit_codes import ExitCode
from tests.watching.test_run_record import RECORD

SECONDS = 60


def line(*runs, addresses=("10.0.0.1:6379",), unreadable=()):
    """The line that the reader writes of one look."""
    described = [{"answered": answered, "record": json.loads(record.to_json())} for record, answered in runs]
    clusters = [
        {"address": address, "runs": described if i == 0 else [], "unreadable": list(unreadable)}
        for i, address in enumerate(addresses)
    ]
    return json.dumps({"clusters": clusters})


@pytest.fixture
def reader(monkeypatch, tmp_path):
    """Has the reader write these lines, and end with a code."""

    def use(*lines, code=0, message=""):
        program = tmp_path / "reader.py"
        program.write_text(
            "import sys, pathlib\n"
            f"pathlib.Path({str(tmp_path / 'arguments')!r}).write_text(' '.join(sys.argv[1:]))\n"
            f"for line in {lines!r}:\n    print(line, flush=True)\n"
            f"print({message!r}, file=sys.stderr)\nsys.exit({code})\n"
        )
        monkeypatch.setattr(top, "READER", (sys.executable, str(program)))
        return tmp_path / "arguments"

    return use


@pytest.fixture(autouse=True)
def run_of_seven_minutes(monkeypatch):
    """The clock by which ``top`` says how long ago a run was launched."""
    monkeypatch.setattr(top.time, "time", lambda: RECORD.launched + 400)


RUN = (RECORD, True)


def test_one_table(reader, capsys):
    arguments = reader(line(RUN))
    assert main(["top", "--once", "--address", "10.0.0.1:6379"]) == ExitCode.OK
    assert arguments.read_text() == "--interval 2.0 --once --address 10.0.0.1:6379"
    assert capsys.readouterr().out.splitlines() == [
        "train.py, process 42 on 10.0.0.1, on cpu, launched 7 min ago",
        "recoveries: 1, 2.5 s in all; the last: recovered group 1",
        "",
        "function    steps  failed  under way  s/step  steps/s  last ended",
        "train_step  1200   1       3          0.5     2        0.2 s ago",
        "",
        "group  process  node                           pid  memory   device memory  pending  state",
        "0      0        10.0.0.1                       43   -        -              -        -",
        "1      0        10.0.0.2, shared with group 0  44   1.0 GiB  1.0 MiB        2        running "
        "fwd_1__2 in step 7 for 0.1 s",
    ]


def test_json(reader, capsys):
    reader(line(RUN))
    assert main(["top", "--once", "--json"]) == ExitCode.OK
    shown = json.loads(capsys.readouterr().out)
    assert shown["clusters"] == ["10.0.0.1:6379"]
    assert shown["runs"] == [{"answered": True, **json.loads(RUN[0].to_json())}]


def test_a_driver_that_does_not_answer(reader, capsys):
    reader(line((RUN[0], False)))
    assert main(["top", "--once"]) == ExitCode.OK
    assert "its driver does not answer" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--once"]])
def test_without_a_run_it_says_so(reader, capsys, options):
    reader(line())
    assert main(["top", *options]) == ExitCode.FAULT
    assert capsys.readouterr().out == "there is no run on the Ray cluster at 10.0.0.1:6379\n"
    reader(line(addresses=()))
    assert main(["top", *options]) == ExitCode.FAULT
    assert capsys.readouterr().out.startswith("there is no run: no Ray cluster of this user")


def test_without_a_run_there_is_json_too(reader, capsys):
    reader(line())
    assert main(["top", "--json"]) == ExitCode.FAULT
    assert json.loads(capsys.readouterr().out)["runs"] == []


def test_records_that_cannot_be_read_are_named(reader, capsys):
    reader(line(unreadable=["not one of version 1"]))
    assert main(["top", "--once"]) == ExitCode.FAULT
    assert "not one of version 1" in capsys.readouterr().out


def test_what_is_wrong_with_the_cluster_is_said(reader, capsys):
    reader(code=2, message="a warning\nno Ray cluster at 10.0.0.1:1, where nothing can be reached")
    assert main(["top", "--address", "10.0.0.1:1"]) == ExitCode.USAGE
    assert capsys.readouterr().err == (
        "mpmd: error: no Ray cluster at 10.0.0.1:1, where nothing can be reached\n"
    )


def test_an_interval_that_is_too_short(reader, capsys):
    reader()
    assert main(["top", "--interval", "0.1"]) == ExitCode.USAGE
    assert "--interval must be at least 0.5 seconds, not 0.1" in capsys.readouterr().err


def test_it_goes_on_until_the_run_has_ended(reader, capsys):
    reader(line(RUN), line(RUN), line())
    assert main(["top"]) == ExitCode.OK
    assert capsys.readouterr().out.count("train_step  1200") == 2


def test_in_a_terminal_it_writes_in_place(reader, tmp_path):
    reader(line(RUN), line(RUN))
    ours, theirs = pty.openpty()
    program = f"from mpmd.cli import main, top; top.READER = {top.READER!r}; main(['top'])"
    output = []

    def read():
        while True:
            try:
                output.append(os.read(ours, 4096).decode())
            except OSError:  # the other end is closed
                return

    reading = threading.Thread(target=read)
    reading.start()
    environment = {**os.environ, "COLUMNS": "60", "LINES": "24"}
    subprocess.run(
        [sys.executable, "-c", program], stdout=theirs, env=environment, check=True, timeout=SECONDS
    )
    os.close(theirs)
    reading.join(SECONDS)
    shown = "".join(output)
    assert shown.startswith(top._OTHER_SCREEN) and shown.endswith(top._FIRST_SCREEN)
    assert shown.count(top._HOME) == 2
    assert all(len(row) <= 60 + len(top._END_OF_LINE) + 20 for row in shown.split("\r\n"))


def test_a_page_has_no_more_lines_than_the_terminal(monkeypatch):
    monkeypatch.setenv("LINES", "6")
    page = top._page(top.Look.of(line(RUN)))
    rows = page.removeprefix(top._HOME).removesuffix(top._BELOW).splitlines()
    assert len(rows) == 5
    assert rows[-1].startswith("... 7 more lines")
