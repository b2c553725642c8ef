"""The record of a run as JSON, which other processes may have written."""

import dataclasses
import json

import pytest

from mpmd.watching.run_record import FunctionRecord, ProcessRecord, RunRecord

RECORD = RunRecord(
    run="0f",
    program="train.py",
    node="10.0.0.1",
    pid=42,
    job="01000000",
    platform="cpu",
    launched=1.5e9,
    published=3,
    recoveries=1,
    recovery_seconds=2.5,
    last_recovery="recovered group 1",
    processes=(
        ProcessRecord(0, 0, "10.0.0.1", 43),
        ProcessRecord(1, 0, "10.0.0.2", 44, 0, "running fwd_1__2 in step 7 for 0.1 s", 2, 2**30, 2**20),
    ),
    functions=(
        FunctionRecord("train_step", 1200, 1, 3, 0.5, 0.25),
        FunctionRecord("eval", 0, 0, 0, None, None),
    ),
)


def test_a_record_is_the_same_after_the_way_through_json():
    assert RunRecord.from_json(RECORD.to_json()) == RECORD


def test_numbers_may_be_whole():
    assert RunRecord.from_json(dataclasses.replace(RECORD, launched=1).to_json()).launched == 1


def test_text_cannot_command_a_terminal():
    record = dataclasses.replace(RECORD, program="\x1b[2Jtrain\n.py\x07")
    assert RunRecord.from_json(record.to_json()).program == " [2Jtrain .py "


def changed(**fields):
    return json.dumps({**json.loads(RECORD.to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "not the record of a run"),
        ("{}", "not the record of a run"),
        (changed(version=2), "version 1"),
        (changed(more=1), "the record must have run, program"),
        (changed(pid="42"), "the record.pid must be of type int"),
        (changed(pid=True), "the record.pid must be of type int"),
        (changed(pid=1.5), "the record.pid must be of type int"),
        (changed(program=None), "the record.program must be a text"),
        (changed(launched=float("inf")), "the record.launched must be finite"),
        (changed(processes={}), "the record.processes must be a list"),
        (changed(processes=[1]), r"the record.processes\[0\] must have mpmd_idx"),
        (changed(functions=[{"name": "f"}]), r"the record.functions\[0\] must have name"),
    ],
)
def test_other_texts_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        RunRecord.from_json(text)
