"""Equations of a directory that do not belong together are refused before any is evaluated."""

import dataclasses

import pytest

from mpmd.replay.check import check_equations
from mpmd.replay.record import (
    ArrayType,
    Block,
    Conditional,
    Constant,
    Equations,
    Export,
    Scan,
    Single,
    Source,
    TaskRecord,
    ValueRecord,
    While,
)

NUMBER = ArrayType("float32", (), None)
ADD = Export((NUMBER, NUMBER), (NUMBER,), 1, ("cpu",), 9, False)
SOURCES = (Source("add", "train.py:1 (step)", ""),)


VALUE = ValueRecord("w", "float32", (), None, None, False, False, 0, 0)


def record(without_executable="none"):
    submesh, values = (("data", 1),), (VALUE, VALUE)
    texts = ("cpu", "cpu", {}, {}, "2026-01-01")
    return TaskRecord(
        1, "fwd_0__0", "fwd_0__0", 0, None, values, (VALUE,), submesh, "e", without_executable, *texts
    )


def add(reads=(0, 1), makes=(2,), **changes):
    return dataclasses.replace(Single(0, 0, "", reads, makes), **changes)


def scan(**changes):
    body = Block((0, 1), (add(),), (2,))
    return dataclasses.replace(Scan(0, (0, 1), (2,), 1, 1, 3, False, body), **changes)


def loop(**changes):
    condition, body = Block((0,), (), (0,)), Block((0,), (add((0, 0), (1,)),), (1,))
    return dataclasses.replace(While(0, (1,), (2,), 0, 0, condition, body), **changes)


def equations(*of_block, outputs=(2,), exports=(ADD,), executable=None):
    return Equations(SOURCES, Block((0, 1), of_block, outputs), exports, executable)


@pytest.mark.parametrize(
    "right",
    [
        equations(add(), executable=0),
        equations(add(export=None, reason="no portable form")),
        equations(Constant("float32", (), "00000000", 3), add((0, 3))),
        equations(scan()),
        equations(Conditional(0, (0, 1, 1), (2,), (Block((0, 1), (add(),), (2,)),))),
        equations(loop()),
    ],
)
def test_right_equations(right):
    check_equations(right, record("none" if right.executable is None else ""))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (equations(add(reads=(0, 7))), "equation 0 reads the value 7, which no equation before it makes"),
        (equations(add((0, 2))), "reads the value 2"),
        (equations(add(), outputs=(9,)), "reads the value 9"),
        (equations(add(export=-1)), "export is -1, and there are 1"),
        (equations(add(export=1)), "export is 1, and there are 1"),
        (equations(add(source=5)), "source is 5"),
        (equations(add(makes=())), "makes 1, not 2 and 0"),
        (equations(add(), executable=4), "executable is 4"),
        (equations(add(), outputs=()), "block takes 2 values and makes 0, not 2 and 1"),
        (equations(add(), exports=(dataclasses.replace(ADD, num_devices=0),)), "nothing runs on 0"),
        (equations(add(), exports=(dataclasses.replace(ADD, platforms=()),)), "nothing runs on 1"),
        (
            equations(add(), exports=(dataclasses.replace(ADD, outputs=(NUMBER._replace(dtype="object"),)),)),
            "no dtype 'object'",
        ),
        (
            equations(add(), exports=(dataclasses.replace(ADD, outputs=(NUMBER._replace(shape=(-1,)),)),)),
            "no array has the shape",
        ),
        (equations(Constant("float32", (), "zz", 3), add()), "hexadecimal"),
        (equations(Constant("float32", (2,), "00000000", 3), add()), "shape"),
        (equations(scan(num_carry=-1)), "other operands than its parts"),
        (equations(scan(num_consts=2)), "other operands than its parts"),
        (equations(scan(length=-1)), "other operands than its parts"),
        (equations(scan(body=Block((0,), (), (0,)))), "takes 1 values and makes 1, not 2 and 1"),
        (equations(Conditional(0, (0, 1), (2,), ())), "other operands than its parts"),
        (equations(loop(num_body_consts=1)), "other operands than its parts"),
        (equations(loop(condition=Block((0,), (), ()))), "makes 0, not 1 and 1"),
    ],
)
def test_wrong_equations(wrong, message):
    with pytest.raises(ValueError, match=message):
        check_equations(wrong, record("none" if wrong.executable is None else ""))


@pytest.mark.parametrize(("executable", "reason"), [(None, ""), (0, "none")])
def test_an_executable_that_the_record_has_not(executable, reason):
    with pytest.raises(ValueError, match="executable is not as the record says"):
        check_equations(equations(add(), executable=executable), record(reason))
