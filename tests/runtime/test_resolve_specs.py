"""Open specs are chosen by the groups' compilers, each executable once, as soon as its inputs are known."""

import concurrent.futures
from concurrent.futures import Future

import jax
import pytest

from mpmd.ir.plan import Aval, Executable, GroupProgram, InputLeaf, OutputLeaf, Plan, Recv, Run, Send, Task
from mpmd.program import Program
from mpmd.runtime.resolve_specs import resolve_specs

ROWS = Aval((4, 2), "float32", 4)


def executable(name, in_spec, out_spec=None):
    return Executable(name, (ROWS,), (ROWS,), (), (in_spec,), (out_spec,))


def chain(submeshes):
    """Group 0 makes ``h`` of ``x``, group 1 makes ``y`` of ``h``; each makes ``z`` of its ``w`` besides."""
    programs = (
        GroupProgram(
            0,
            (
                Run(Task("fwd", 0, 0), "first", ("x",), ("h",)),
                Send(("h",), 1, 0),
                Run(Task("bwd", 0, 0), "beside", ("w0",), ("z0",)),
            ),
        ),
        GroupProgram(
            1,
            (
                Recv(("h",), 0, 0),
                Run(Task("fwd", 1, 0), "second", ("h",), ("y",)),
                Run(Task("bwd", 1, 0), "beside", ("w1",), ("z1",)),
            ),
        ),
    )
    plan = Plan(
        programs,
        (executable("first", ("data",)), executable("second", None), executable("beside", ())),
        (
            InputLeaf("x", "x", ROWS, (0,), ("data",), False),
            InputLeaf("w0", "w0", ROWS, (0,), (), False),
            InputLeaf("w1", "w1", ROWS, (1,), (), False),
        ),
        (),
        tuple(OutputLeaf(name, name, ROWS, (i,), None) for name, i in [("z0", 0), ("y", 1), ("z1", 1)]),
        submeshes,
    )
    return Program(plan, dict.fromkeys(("first", "second", "beside"), jax.numpy.sin), {})


EVEN = ((("data", 2),),) * 2


class Compiler:
    """Answers when it is told to."""

    def __init__(self):
        self.asked = []
        self.answers = {}

    def compile(self, mpmd_idx, executable, function):
        key = (mpmd_idx, executable.name)
        self.asked.append((*key, executable.in_specs, executable.out_specs))
        return self.answers.setdefault(key, Future())

    def answer(self, mpmd_idx, name, spec):
        self.answers[mpmd_idx, name].set_result((spec,))


def wait_for(condition):
    for _ in range(2000):
        if condition():
            return
        concurrent.futures.wait([Future()], timeout=0.005)
    raise AssertionError("nothing was asked")


def test_a_group_compiles_what_does_not_wait_for_others():
    compiler = Compiler()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        resolved = pool.submit(resolve_specs, chain(EVEN), compiler.compile)
        wait_for(lambda: len(compiler.asked) == 2)
        # Both groups run ``beside``: the first one that can chooses, and the other waits for the choice.
        assert [asked[:2] for asked in compiler.asked] == [(0, "first"), (0, "beside")]
        compiler.answer(0, "beside", ())
        wait_for(lambda: len(compiler.asked) == 3)
        assert compiler.asked[2] == (1, "beside", ((),), ((),))
        compiler.answer(0, "first", (None, "data"))
        wait_for(lambda: len(compiler.asked) == 4)
        assert compiler.asked[3] == (1, "second", ((None, "data"),), (None,))
        compiler.answer(1, "second", ("data",))
        compiler.answer(1, "beside", ())
        program = resolved.result(20)
    assert {leaf.name: leaf.spec for leaf in program.plan.outputs} == {"y": ("data",), "z0": (), "z1": ()}
    assert program.compiled["second"] == ("second", ((None, "data"),))


def test_a_choice_that_does_not_fit_on_the_reader_is_replicated_there():
    compiler = Compiler()
    answers = {(0, "first"): ("data",), (0, "beside"): (), (1, "second"): (), (1, "beside"): ()}
    for key, spec in answers.items():
        compiler.answers[key] = future = Future()
        future.set_result((spec,))
    resolve_specs(chain(((("data", 2),), (("data", 3),))), compiler.compile)
    assert (1, "second", ((),), (None,)) in compiler.asked


def test_what_a_compiler_raises_is_raised():
    compiler = Compiler()
    compiler.answers[0, "first"] = future = Future()
    future.set_exception(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        resolve_specs(chain(EVEN), compiler.compile)
