"""What the messages of compiled steps carry between the processes of groups."""

import functools
import math

import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.ir import reshard
from mpmd.ir.reshard import GroupShape, volume
from mpmd.ir.routes import Routes, Topology, held_specs
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of

WHOLE = (None, "data")
ONE, TWO = (GroupShape({"stage": 1, "data": 2}, count) for count in (1, 2))


@functools.cache
def resolved_plan(spec):
    """Of a step on two groups of two devices, after their compilers have chosen the open specs."""
    with mesh_of(2, data=2) as mesh:
        step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh, in_specs=(P(), P(*spec), P(*spec)))
        return step.compile(init(weights(2)), *batch()).plan


def routes_of(plan, *groups, gathering=frozenset()):
    return Routes(plan, Topology(groups, gathering)).of_group(0)


def moved(route, process):
    """The bytes that a process sends of a message."""
    parts = [part for parts in route.sent_by(process).values() for part in parts]
    return sum(volume(part.box) * route.passages[part.value].aval.itemsize for part in parts)


def whole(route):
    """The bytes of a message's whole values."""
    return sum(passage.aval.nbytes for passage in route.passages)


def test_rows_stay_with_their_processes():
    plan = resolved_plan(WHOLE)
    routes = routes_of(plan, TWO, TWO)
    assert {key[:2] for key in routes} == {(0, 1), (1, 0)}
    for route in routes.values():
        sharded = [passage for passage in route.passages if math.prod(passage.aval.shape) > 1]
        assert all(set(route.sent_by(rank)) <= {rank} for rank in range(2) if sharded)
        assert moved(route, 0) + moved(route, 1) == whole(route)


def test_replicated_readers_that_gather_get_it_once(monkeypatch):
    monkeypatch.setattr(reshard, "GATHERED_BYTES", 0)
    plan = resolved_plan(())
    for key, route in routes_of(plan, TWO, TWO, gathering=frozenset({(0, 1)})).items():
        divisible = all(any(size % 2 == 0 for size in p.aval.shape) for p in route.passages)
        gathers = key[:2] == (0, 1) and divisible
        assert moved(route, 0) + moved(route, 1) == (1 if gathers else 2) * whole(route)
        assert all((p.landing != p.spec) == gathers for p in route.passages)


def test_both_ends_find_the_same_routes():
    plan = resolved_plan(WHOLE)
    routes = Routes(plan, Topology((TWO, ONE)))
    assert routes.of_group(0) == routes.of_group(1)


@pytest.mark.parametrize("spec", [(), WHOLE], ids=str)
@pytest.mark.parametrize("groups", [(ONE, ONE), (TWO, ONE), (TWO, TWO)], ids=str)
def test_the_bytes_of_a_step_are_those_of_its_messages(spec, groups):
    routes = Routes(resolved_plan(spec), Topology(groups))
    for edge, by_processes in routes.sent_bytes().items():
        messages = [route for key, route in routes.of_group(0).items() if key[:2] == edge]
        for src in range(groups[edge[0]].num_processes):
            sent = sum(count for (process, _), count in by_processes.items() if process == src)
            assert sent == sum(moved(route, src) for route in messages)


def test_every_value_that_a_group_has_has_a_spec():
    plan = resolved_plan(WHOLE)
    for program in plan.programs:
        specs = held_specs(plan, program.mpmd_idx, {"stage": 1, "data": 2})
        assert {name for run in program.runs for name in (*run.inputs, *run.outputs)} <= specs.keys()
        assert {leaf.name for leaf in plan.outputs_of(program.mpmd_idx).values()} <= specs.keys()
