"""Draws programs. A failing one shrinks to few stages and to what most programs are."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
from hypothesis import strategies as st

from tests.support.random_programs.description import Layer, Output, Program, Side, Skip, Stage
from tests.support.random_programs.layers import KINKED, LAYERS, WEIGHTED, WRAPS
from tests.support.random_programs.loop import KEYS, OPERATIONS, SIDES
from tests.support.random_programs.outside import OPTIMIZERS, SUBMESHES
from tests.support.random_programs.schedules import placements

NO_AXIS_1 = ("one", "index", "count", "penalty")
FLOATS = ("h", "first", "x", "weight", "penalty", "half", "complex")
BEFORE = ("scale", "normalise", "square", "merge", "inputs")
RESULTS = ("literal", "constant", "batch", "given", "weight", "prepared", "twice", "none", "sum_of_all")


def mostly(usual, *others):
    """``usual`` in half of all programs, or more if it is among the others.

    It is one draw: Hypothesis can shrink lists whose elements are of few draws.
    """
    return st.sampled_from([usual] * len(others) + list(others))


rarely = mostly(False, False, False, True)


def subsets(names):
    """None, one or two of the names."""
    return mostly((), *itertools.chain(*(itertools.combinations(names, count) for count in range(3))))


def layers(weights):
    def layer(operation, weight, wraps, frozen):
        has_weight = operation in WEIGHTED
        return Layer(operation, weight if has_weight else None, wraps, frozen and has_weight)

    wraps = mostly((), *((name,) for name in WRAPS), *filter(can_wrap, itertools.product(WRAPS, WRAPS)))
    return st.builds(layer, st.sampled_from(list(LAYERS)), st.integers(0, weights - 1), wraps, rarely)


def can_wrap(wraps):
    """JAX does not compile a custom rule for a function that closes over a traced value, the index here."""
    inner, outer = wraps
    return inner != "cond" or outer not in ("custom_jvp", "custom_vjp")


def stages(weights, dtypes):
    skip = st.builds(Skip, st.integers(1, 4), st.sampled_from(["before", "after", "marks"]))
    flags = subsets(["reads_input", "touches_sides", "stops", "marks_sides_only", "jit_mark"])

    def stage(layers, skips, dtype, flags):
        return Stage(tuple(layers), tuple(skips), dtype, **dict.fromkeys(flags, True))

    return st.builds(stage, st.lists(layers(weights), max_size=2), st.lists(skip, max_size=2), dtypes, flags)


def outputs(sides):
    def operations(value):
        allowed = [name for name in OPERATIONS if name != "Concat(1)" or value not in NO_AXIS_1]
        allowed = [name for name in allowed if name not in ("Mean", "Decay") or value in FLOATS]
        return [name for name in allowed if name != "Add" or value != "flags"]

    values = ["h", "first", "one", "x", "y", "index", "weight", *(side.kind for side in sides)]
    return st.sampled_from(values).flatmap(
        lambda value: st.builds(Output, st.just(value), st.sampled_from(operations(value)))
    )


@st.composite
def programs(draw):
    """Programs that plain JAX runs, on no more than this process's devices."""
    low = draw(rarely)
    dtypes = mostly("float32", "bfloat16", "float16") if low else st.just("float32")
    weights = tuple(draw(st.lists(dtypes, min_size=1, max_size=4)))
    stacked = len(set(weights)) == 1 and draw(rarely)
    chain = draw(st.lists(stages(len(weights), dtypes), min_size=draw(st.integers(1, 4)), max_size=6))
    kinds = [kind for kind in (*SIDES, *KEYS) if low or kind != "half"]
    side = st.builds(Side, st.sampled_from(kinds), st.booleans())
    sides = draw(st.lists(side, max_size=3, unique_by=lambda side: side.kind).map(tuple))
    mode = draw(mostly("grad", "grad", "grad", "forward", "jvp"))
    trains = mode == "grad"
    loop_over_index = draw(rarely)
    keys_in_batch = draw(st.booleans()) and any(side.kind in KEYS for side in sides)
    microbatches = draw(st.integers(1, 6))
    schedule, groups = draw(st.sampled_from(placements(len(chain), microbatches, trains)))
    program = Program(
        stages=tuple(without_dangling_skips(chain)),
        groups=groups,
        schedule=schedule,
        chance=draw(st.integers(0, 9)),
        microbatches=microbatches,
        weights=weights,
        stacked=stacked,
        undifferentiated=() if stacked else tuple(i for i in range(len(weights)) if draw(rarely)),
        mode=mode,
        sides=sides,
        outputs=tuple(draw(st.lists(outputs(sides), max_size=2))),
        loss=draw(st.sampled_from(["squares", "tokens"])),
        loss_back=draw(mostly(0, 0, *range(len(chain)))),
        l2=draw(rarely),
        loss_operation=draw(mostly("Add", "Concat(0)", "Mean", "Last", "Max")),
        gradient_operation=draw(mostly("Add", "Add", "Concat(0)", "Mean", "Onto")) if trains else "Add",
        input_gradient=trains and draw(rarely),
        last_mark=draw(rarely),
        vmap=draw(mostly("", "", "", "loss", "gradient")),
        jit=draw(mostly("", "", "loss", "body", "loop", "update")),
        marks_weights=draw(rarely) and draw(rarely),
        gradients_inside=draw(mostly("", "", "", "clip", "by_loss")) if trains else "",
        loop_over_index=loop_over_index,
        keys_in_batch=keys_in_batch,
        axis=0 if keys_in_batch and not loop_over_index else draw(mostly(0, 0, 1, -1)),
        before=draw(subsets(BEFORE)),
        inside=draw(subsets(BEFORE)),
        optimizer=draw(mostly("sgd", *OPTIMIZERS)) if trains else "sgd",
        update=draw(mostly("", "", "", "cond", "where", "twice")) if trains else "",
        results=draw(subsets(RESULTS)),
        submesh=draw(st.sampled_from([""] * 32 + list(SUBMESHES))),
        donate=draw(mostly("", "", "state", "all")),
    )
    return with_optimizer(fitting(in_order(differentiable(program))))


@st.composite
def programs_of_two_loops(draw):
    """Programs whose second loop takes what the first one has updated, on as many groups or fewer."""
    program = draw(programs())
    possible = placements(len(program.stages), program.microbatches, program.mode == "grad")
    second = draw(st.sampled_from([(name, size) for name, size in possible if size <= program.groups]))
    return in_order(dataclasses.replace(program, again=second))


def without_dangling_skips(chain):
    for i, stage in enumerate(chain):
        yield dataclasses.replace(stage, skips=tuple(skip for skip in stage.skips if skip.back <= i))


def with_optimizer(program):
    """The program with an optimizer that takes its weights: optax flattens no empty trees."""
    is_empty = len(program.undifferentiated) == len(program.weights)
    return dataclasses.replace(program, optimizer="sgd") if is_empty else program


def fitting(program):
    """The program on no more than this process's devices."""
    devices = int(np.prod([*SUBMESHES[program.submesh].values()], dtype=int))
    if program.groups * devices > jax.device_count():
        return dataclasses.replace(program, submesh="")
    return program


def differentiable(program):
    """The program without layers whose derivative cannot be compared, or JAX cannot derive forwards."""
    kinked = () if program.precise else KINKED
    wrong_wraps = ("custom_vjp",) if program.mode == "jvp" else ()

    def fit(layer):
        operation = "tanh" if layer.operation in kinked else layer.operation
        wraps = tuple(wrap for wrap in layer.wraps if wrap not in wrong_wraps)
        return dataclasses.replace(layer, operation=operation, wraps=wraps)

    fitted = (dataclasses.replace(stage, layers=tuple(map(fit, stage.layers))) for stage in program.stages)
    return dataclasses.replace(program, stages=tuple(fitted))


def in_order(program):
    """The program with ascending microbatches if its operations depend on their order."""
    operations = {program.loss_operation, program.gradient_operation}
    operations |= {output.operation for output in program.outputs}
    independent = operations <= {"Add", "Max", "Concat(0)", "Concat(1)", "Concat(-1)"}

    def ordered(name):
        return "Shuffled" if name == "Unordered" and not independent else name

    again = program.again and (ordered(program.again[0]), program.again[1])
    return dataclasses.replace(program, schedule=ordered(program.schedule), again=again)
