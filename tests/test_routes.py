"""What the messages of compiled steps carry between the processes of groups."""

import math

from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.reshard import GroupShape, volume
from mpmd.routes import find_routes, held_specs
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of

WHOLE = (None, "data")


def resolved_plan(spec):
    """Of a step on two groups of two devices, after their compilers have chosen the open specs."""
    with mesh_of(2, data=2) as mesh:
        step = mpmd.mpmd_jit_with_loop(
            make_step(mse, mpmd.Std1F1B(2)), mpmd_mesh=mesh, in_specs=(P(), P(*spec), P(*spec))
        )
        return step.compile(init(weights(2)), *batch()).plan


def moved(routes, key, process):
    """The bytes that a process sends of a message."""
    route = routes[key]
    parts = [part for parts in route.sent_by(process).values() for part in parts]
    return sum(volume(part.box) * route.avals[part.value].itemsize for part in parts)


def test_rows_stay_with_their_processes():
    plan = resolved_plan(WHOLE[:1] + WHOLE[1:])
    shape = GroupShape({"stage": 1, "data": 2}, 2)
    routes = find_routes(plan, [shape, shape], 0)
    assert {key[:2] for key in routes} == {(0, 1), (1, 0)}
    for key, route in routes.items():
        sharded = [aval for aval in route.avals if math.prod(aval.shape) > 1]
        assert all(set(route.sent_by(rank)) <= {rank} for rank in range(2) if sharded)
        assert moved(routes, key, 0) + moved(routes, key, 1) == sum(aval.nbytes for aval in route.avals)


def test_replicated_readers_get_all_of_it_each():
    plan = resolved_plan(())
    routes = find_routes(plan, [GroupShape({"stage": 1, "data": 2})] * 2, 1)
    assert all(moved(routes, key, 0) == sum(a.nbytes for a in route.avals) for key, route in routes.items())
    two = GroupShape({"stage": 1, "data": 2}, 2)
    for key, route in find_routes(plan, [two, two], 1).items():
        total = moved(find_routes(plan, [two, two], 1), key, 0)
        total += moved(find_routes(plan, [two, two], 1), key, 1)
        assert total == 2 * sum(aval.nbytes for aval in route.avals)


def test_both_ends_find_the_same_routes():
    plan = resolved_plan(WHOLE)
    groups = [GroupShape({"stage": 1, "data": 2}, 2), GroupShape({"stage": 1, "data": 2}, 1)]
    assert find_routes(plan, groups, 0) == find_routes(plan, groups, 1)


def test_every_value_that_a_group_has_has_a_spec():
    plan = resolved_plan(WHOLE)
    for program in plan.programs:
        specs = held_specs(plan, program.mpmd_idx, {"stage": 1, "data": 2})
        assert {name for run in program.runs for name in (*run.inputs, *run.outputs)} <= specs.keys()
        assert {leaf.name for leaf in plan.outputs_of(program.mpmd_idx).values()} <= specs.keys()
