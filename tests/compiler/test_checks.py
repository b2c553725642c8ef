"""A level with one fault is refused; the levels of real steps are checked in every test that compiles one."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.compat import NAMELESS
from mpmd.compiler.checks import (
    check_cut_step,
    check_placed_graph,
    check_sharded_graph,
    check_task_graph,
    check_traced_step,
)
from mpmd.compiler.cut_layers import cut_layers
from mpmd.compiler.place import place
from mpmd.compiler.shard import shard
from mpmd.compiler.split import split
from mpmd.ir.plan import TaskType
from mpmd.ir.stack import Stack
from mpmd.language.annotate import mark_p
from mpmd.language.reduce import treduce_p
from tests.support.levels import SUBMESHES, traced_step, without_shardings
from tests.support.models import batch, mse, sgd_step, weights

replace = dataclasses.replace


@pytest.fixture(scope="module")
def traced():
    return traced_step(sgd_step(mse, mpmd.Std1F1B(2)), weights(2), *batch(), submeshes=SUBMESHES)


@pytest.fixture(scope="module")
def cut(traced):
    return cut_layers(traced)


@pytest.fixture(scope="module")
def graph(cut):
    return split(cut)


@pytest.fixture(scope="module")
def sharded(graph):
    return shard(graph, SUBMESHES, without_shardings(graph.step))


@pytest.fixture(scope="module")
def placed(sharded, cut):
    return place(sharded, SUBMESHES, without_shardings(cut), {})


def changed(items, position, **changes):
    return tuple(replace(item, **changes) if i == position else item for i, item in enumerate(items))


def mark(step):
    return next(eqn for eqn in step.loops[0].eqns if eqn.primitive is mark_p)


def with_loop(step, changes):
    return replace(step, loops=(replace(step.loops[0], **changes(step.loops[0])),))


def with_jaxpr(step, **changes):
    return replace(step, jaxpr=step.jaxpr.replace(debug_info=NAMELESS, **changes))


def inner_mark(step):
    (loop,) = (eqn for eqn in step.jaxpr.eqns if eqn.primitive is treduce_p)
    return next(eqn for eqn in loop.params["body"].eqns if eqn.primitive is mark_p)


def a_call():
    """An equation that calls a function, and reads and changes nothing."""
    (eqn,) = jax.make_jaxpr(jax.jit(lambda: jnp.zeros(3)))().eqns
    return eqn


OF_TRACED_STEPS = {
    "has a call outside": lambda s: with_jaxpr(s, eqns=[*s.jaxpr.eqns, a_call()]),
    "has its equations backwards": lambda s: with_jaxpr(s, eqns=s.jaxpr.eqns[::-1]),
    "has a mark outside": lambda s: with_jaxpr(
        s,
        eqns=[
            *s.jaxpr.eqns,
            inner_mark(s).replace(invars=s.jaxpr.invars[:1], outvars=inner_mark(s).outvars[:1]),
        ],
    ),
    "takes an argument for another one": lambda s: replace(
        s, fed_back_leaves=((0, s.fed_back_leaves[1][1]), *s.fed_back_leaves[2:])
    ),
}


OF_CUT_STEPS = {
    "has a call in the loop": lambda s: with_loop(s, lambda loop: {"eqns": (a_call(), *loop.eqns)}),
    "has an argument in other parts": lambda s: replace(
        s,
        argument_leaves=changed(s.argument_leaves, 0, stack=Stack(0, (1, s.argument_leaves[0].shape[0] - 1))),
    ),
    "lacks an equation of the loop": lambda s: with_loop(s, lambda loop: {"eqns": loop.eqns[1:]}),
    "has an equation of the loop twice": lambda s: with_loop(
        s, lambda loop: {"eqns": (*loop.eqns, loop.eqns[-1])}
    ),
    "numbers stages otherwise than marks": lambda s: with_loop(s, lambda loop: {"first_stage": 1}),
    "lacks a result of the loop": lambda s: with_loop(s, lambda loop: {"results": loop.results[1:]}),
    "has a mark outside": lambda s: replace(
        s,
        outside=(
            s.outside[0],
            (*s.outside[1], mark(s).replace(invars=[s.results[0].var], outvars=mark(s).outvars[:1])),
        ),
    ),
    "takes an argument for another one": lambda s: replace(
        s, fed_back=((0, s.fed_back[1][1]), *s.fed_back[2:])
    ),
}


OF_TASK_GRAPHS = {
    "has a call in work": lambda g: replace(
        g, stage_work=changed(g.stage_work, 0, eqns=(*g.stage_work[0].eqns, a_call()))
    ),
    "lacks an equation outside": lambda g: replace(g, outer=g.outer[1:]),
    "has its work backwards": lambda g: replace(g, stage_work=g.stage_work[::-1]),
    "has work twice": lambda g: replace(g, stage_work=(*g.stage_work, g.stage_work[-1])),
    "lacks an equation of work": lambda g: replace(
        g, stage_work=changed(g.stage_work, 0, eqns=g.stage_work[0].eqns[1:])
    ),
    "makes less than is read": lambda g: replace(g, stage_work=changed(g.stage_work, 0, makes=())),
    "reads what it does not need": lambda g: replace(
        g, stage_work=changed(g.stage_work, 0, reads=(*g.stage_work[0].reads, g.step.arguments[-1].var))
    ),
    "updates an accumulator elsewhere": lambda g: replace(
        g, accumulators=changed(g.accumulators, 0, work=TaskType("fwd", 0))
    ),
    "starts two accumulators with one value": lambda g: replace(
        g, accumulators=changed(g.accumulators, 0, initial=g.accumulators[1].initial)
    ),
    "lacks an accumulator": lambda g: replace(g, accumulators=g.accumulators[1:]),
}


OF_SHARDED_GRAPHS = {
    "starts an accumulator with another shape": lambda s: replace(
        s,
        graph=replace(
            s.graph, accumulators=changed(s.graph.accumulators, 0, result=s.graph.step.arguments[-1].var)
        ),
    ),
    "shards an accumulator otherwise at first": lambda s: replace(
        s, specs={**s.specs, s.graph.accumulators[0].initial: ("data",)}
    ),
    "lacks work": lambda s: replace(s, graph=replace(s.graph, stage_work=s.graph.stage_work[1:])),
}


def last_before(placed):
    return max(i for i, member in enumerate(placed.eqns) if member.segment == 0)


OF_PLACED_GRAPHS = {
    "lacks an equation": lambda p: replace(p, eqns=p.eqns[1:]),
    "runs an equation nowhere": lambda p: replace(p, eqns=changed(p.eqns, 0, levels={})),
    "runs an equation on a group that is not there": lambda p: replace(
        p, eqns=changed(p.eqns, 0, levels={7: 0})
    ),
    "runs an equation elsewhere than what it reads": lambda p: replace(
        p, eqns=changed(p.eqns, last_before(p), levels={1 - next(iter(p.eqns[last_before(p)].levels)): 0})
    ),
    "runs before the loop what needs the loop": lambda p: replace(
        p, eqns=changed(p.eqns, len(p.eqns) - 1, segment=0)
    ),
    "has a stage on a group that is not there": lambda p: replace(p, stage_groups=(0, 2)),
    "holds a result nowhere": lambda p: replace(p, output_groups=(frozenset(), *p.output_groups[1:])),
    "has no home for an argument": lambda p: replace(
        p, homes={**p.homes, p.graph.step.arguments[0].var: frozenset()}
    ),
}


LEVELS = {
    "traced": (check_traced_step, "traced step", OF_TRACED_STEPS),
    "cut": (check_cut_step, "cut step", OF_CUT_STEPS),
    "graph": (check_task_graph, "task graph", OF_TASK_GRAPHS),
    "sharded": (check_sharded_graph, "sharded graph", OF_SHARDED_GRAPHS),
    "placed": (check_placed_graph, "placed graph", OF_PLACED_GRAPHS),
}


@pytest.mark.parametrize(
    ("level", "fault"), [(level, fault) for level in LEVELS for fault in LEVELS[level][2]]
)
def test_a_level_that(level, fault, request):
    check, text, faults = LEVELS[level]
    value = request.getfixturevalue(level)
    check(value)
    with pytest.raises(AssertionError, match=f"{text} that is wrong"):
        check(faults[fault](value))
