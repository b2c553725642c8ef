"""The parts of the formulas: links, sums over devices, memory, closed forms, and prolonged steps."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from mpmd.planner.all_reduces import AllReduces
from mpmd.planner.candidate import Candidate
from mpmd.planner.cluster import Cluster
from mpmd.planner.collectives import CollectiveCost, DeviceRange, axis_costs, message_link
from mpmd.planner.curves import Curve
from mpmd.planner.layer_profile import Division, TaskWork
from mpmd.planner.search import orders
from mpmd.planner.search.closed_forms import CLOSED_FORMS, closed_form
from mpmd.planner.search.families import GPIPE_OF_SLICES, SLICED, build
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.orders import order_of
from mpmd.planner.search.stages import CostModel
from mpmd.planner.submesh import Submesh
from mpmd.schedules import FAMILIES, GPipe, Interleaved1F1B, Std1F1B, ZeroBubble, ZeroBubbleV
from mpmd.simulate import Costs, Link, simulate
from tests.support.placements import PLACEMENTS
from tests.support.profiles import layer, profile

TWO_NODES = Cluster(2, 4, 1e9, 1e12, 1e12, Link(1e-6, 100e9), Link(1e-5, 10e9))
FAST = Cluster(1, 8, 1e12, 1e12, 1e15, Link(0, math.inf), Link(0, math.inf))


def ring(size, latency, bandwidth):
    """The costs of an all-gather over a ring."""
    return CollectiveCost((size - 1) / size / bandwidth, (size - 1) * latency)


def costs_of(cluster, submesh, start=0):
    """The costs of collectives along ``model``, ``sequence`` and ``data``."""
    return axis_costs(cluster, DeviceRange(start, Submesh.of(submesh)))


def test_rings_have_the_slowest_link_on_their_way():
    gathers = [costs.all_gather for costs in costs_of(TWO_NODES, {"model": 2, "data": 2}, 4)]
    assert gathers == [ring(2, 1e-6, 100e9), CollectiveCost(0, 0), ring(2, 1e-6, 100e9)], "of a node"
    model, _, data = costs_of(TWO_NODES, {"model": 4, "data": 2})
    shared = ring(2, 1e-5, 2.5e9)
    assert (model.all_gather, data.all_gather) == (ring(4, 1e-6, 100e9), shared), "between nodes"
    assert costs_of(TWO_NODES, {"model": 4}, 2)[0].all_gather == ring(4, 1e-5, 10e9), "across the border"


def test_sums_over_devices_take_the_time_of_a_ring():
    nbytes = np.array([1e9, 0.0])
    costs = costs_of(dataclasses.replace(TWO_NODES, collective_floor=2e-6), {"model": 4})[0]
    assert costs.all_gather.seconds(nbytes) == pytest.approx([0.75e9 / 100e9 + 5e-6, 0])
    assert costs.all_reduce.seconds(nbytes, 2.0) == pytest.approx([1.5e9 / 100e9 + 16e-6, 0])


def test_collectives_on_a_node_have_the_curves_of_their_kind():
    plain = dataclasses.replace(TWO_NODES, collective_floor=1.0)
    cluster = dataclasses.replace(plain, rates={"all_reduce 2": Curve(1e9, 1e3), "all_reduce 8": Curve(2e9)})
    submesh = {"model": 2, "data": 4}
    (model, _, data), (plain_model, _, plain_data) = (costs_of(each, submesh) for each in (cluster, plain))
    assert (model.all_reduce.per_byte, model.all_reduce.each) == pytest.approx((1e-9, 1e-6))
    assert model.all_gather == plain_model.all_gather
    assert data == plain_data  # between nodes


def test_collectives_over_other_numbers_of_devices_are_in_proportion_to_rings():
    node = dataclasses.replace(TWO_NODES, nodes=1, devices_per_node=8)
    of_two = costs_of(node, {"model": 2})[0].all_reduce
    rates = {"all_reduce 2": Curve(1 / of_two.per_byte, of_two.each / of_two.per_byte)}
    for size in (3, 4, 8):
        by_link = costs_of(node, {"model": size})[0].all_reduce
        by_curve = costs_of(dataclasses.replace(node, rates=rates), {"model": size})[0].all_reduce
        assert (by_curve.per_byte, by_curve.each) == pytest.approx((by_link.per_byte, by_link.each))


@pytest.mark.parametrize(
    ("submesh", "start", "link"),
    [
        ({"data": 2}, 2, TWO_NODES.device_link),
        ({"data": 4}, 4, Link(1e-5, 2.5e9)),
        ({"data": 8}, 8, Link(1e-5, 2.5e9)),  # on two nodes, each with a link of its own
        ({"model": 4}, 4, Link(1e-5, 10e9)),
    ],
)
def test_messages_between_nodes_share_the_link_by_distinct_parts(submesh, start, link):
    nodes, submesh = dataclasses.replace(TWO_NODES, nodes=4), Submesh.of(submesh)
    assert message_link(nodes, DeviceRange(0, submesh), DeviceRange(start, submesh)) == link


def evaluated(parts, schedule, number, cluster=FAST, rows=None, submesh=None, **flags):
    size = len(parts) // schedule.num_stages
    flags = {"remat": False, "fsdp": False} | flags
    submeshes = (submesh or {},) * schedule.mpmd_dim
    candidate = Candidate((size,) * schedule.num_stages, submeshes, schedule, number, **flags)
    return evaluate(CostModel(profile(tuple(parts), rows or number), cluster), candidate)


@pytest.mark.parametrize(
    "schedule", [GPipe(4), Std1F1B(4), Interleaved1F1B(8, 4), ZeroBubble(4), ZeroBubbleV(8, 4)]
)
def test_the_step_is_that_of_the_simulation(schedule):
    """With a third of forward and backward in the forward, as the simulator has it by default."""
    parts = [layer("", 1e12) for _ in range(schedule.num_stages)]
    found = evaluated(parts, schedule, 8)
    assert found.seconds == pytest.approx(simulate(schedule.tasks(8), Costs(atomic=True)).makespan)
    assert found.prediction.bubble == pytest.approx(simulate(schedule.tasks(8), Costs(atomic=True)).bubble)


def test_rematerialisation_keeps_what_enters_and_computes_again():
    parts = [layer("", 1e12, entering=100, residuals=1000) for _ in range(2)]
    plain, again = (evaluated(parts, GPipe(2), 4, remat=remat) for remat in (False, True))
    assert again.prediction.memory.residuals == 400
    temporaries = plain.prediction.memory.temporaries
    assert temporaries == 2 * 100, "what enters, and its gradient"
    assert again.prediction.memory.temporaries == temporaries + 1000
    assert again.seconds == pytest.approx(plain.seconds * 4 / 3)


def test_weights_are_gathered_in_the_dtype_in_which_they_are_read():
    cluster = Cluster(1, 4, 1e12, 1e12, 1e15, Link(0, 1e9), Link(0, 1e9))
    whole = layer("", 4e12, weights=4 * 10**9)
    half = dataclasses.replace(whole, gathered=2 * 10**9)
    of_whole, of_half = (
        evaluated([part], Std1F1B(1), 1, cluster, 4, {"data": 4}, fsdp=True).seconds for part in (whole, half)
    )
    # The forward and the backward gather three quarters of 4e9 or of 2e9 bytes.
    assert of_whole - of_half == pytest.approx(2 * 0.75 * 2)


def test_merged_all_reduces_count_once_where_xla_merges_them():
    plain = Cluster(1, 4, 1e12, 1e12, 1e15, Link(0, 1e9), Link(0, 1e9))
    division = {"model": Division(4, 0.0, 0.0, 0.0, backward=AllReduces(3e9, 3, 2e9, 2))}
    seconds = [
        evaluated([layer("", 1e12, divisions=division)], Std1F1B(1), 1, cluster, submesh={"model": 2}).seconds
        for cluster in (plain, dataclasses.replace(plain, merges_all_reduces=True))
    ]
    assert seconds == pytest.approx([3 + 3, 3 + 1])


def test_tied_weights_of_a_group_are_summed_and_updated_once():
    cluster = Cluster(1, 4, 1e12, 1e12, 1e9, Link(0, 1e9), Link(0, 1e9))
    parts = (layer("", 0.0, weights=10**9), layer("", 0.0, weights=10**9))
    outside = TaskWork(0.0, 3e9, 3e9)
    alone, tied = (
        dataclasses.replace(profile(some, 1), rows=4, tied=pairs, outside=outside)
        for some, pairs in ((parts[:1], ()), (parts, (((0, 1), 10**9),)))
    )
    one, two = (
        evaluate(
            CostModel(made, cluster),
            Candidate((len(made.layers),), (Submesh(data=2),), Std1F1B(1), 1, False, False),
        )
        for made in (alone, tied)
    )
    # The tasks of a layer read its weights twice, make its gradients, and add them to accumulators: 4 s. Then
    # comes one all-reduce of 1 s, and one update of 3 s.
    assert one.seconds == pytest.approx(4 + 1 + 3)
    assert two.seconds == pytest.approx(2 * 4 + 1 + 3)
    assert two.prediction.communication == pytest.approx(1 / two.seconds)
    assert two.prediction.memory.weights == one.prediction.memory.weights, "they are held once"


OF_FAMILIES = itertools.product(CLOSED_FORMS, [(number, 1, None) for number in (2, 4, 7, 12)])
OF_SLICES = itertools.product(SLICED, [(2, 4, 1), (8, 4, 1), (4, 8, 2), (8, 4, 2)])


@pytest.mark.parametrize(("name", "sizes"), [*OF_FAMILIES, *OF_SLICES])
def test_closed_forms_are_those_of_the_lists(name, sizes):
    groups, (number, slices, stages) = 4, sizes
    if name == GPIPE_OF_SLICES and stages > 1:
        pytest.skip("one stage on each group")
    schedule = build(name, groups, groups * stages, slices) if stages else FAMILIES[name].build(groups)
    stages = schedule.num_stages // groups
    form, order = closed_form(name, slices), order_of(schedule, number)
    args = (np.array([groups]), np.array([stages]), np.array([number]))
    makespan = simulate(order.tasks, Costs(atomic=True), slices=slices).makespan
    unit = slices * (3 if name != "ForwardOnly" else 1)
    # DualPipeV's fused cells are atomic here, while its formula counts their members one by one.
    assert (number + form.fill(*args)[0]) * unit * stages == pytest.approx(makespan, rel=0.06)
    if name != "ForwardOnly":
        most = [max(map(sum, vectors)) / stages / slices for vectors in order.in_flight]
        assert form.in_flight(*args)[0] == pytest.approx((max(most) + min(most)) / 2, abs=0.5)


@pytest.mark.parametrize("stages", [2, 4])
def test_the_first_round_of_microbatches_is_the_longest(stages):
    """Of 9 microbatches on 4 groups, 5 are in the first round and 4 in the second."""
    order = order_of(Interleaved1F1B(4 * stages, 4), 9)
    form, args = CLOSED_FORMS["Interleaved1F1B"], (np.array([4]), np.array([stages]), np.array([9]))
    most = [max(map(sum, vectors)) / stages for vectors in order.in_flight]
    assert form.in_flight(*args)[0] == pytest.approx((max(most) + min(most)) / 2)


@pytest.mark.parametrize("name", [name for name in PLACEMENTS if name in CLOSED_FORMS])
def test_long_steps_are_prolonged(name, monkeypatch):
    schedule = FAMILIES[name].build(4)
    parts = [layer("", 1e12 * (1 + stage % 3 / 4), residuals=1000) for stage in range(schedule.num_stages)]
    whole = evaluated(parts, schedule, 50)
    num_tasks = orders.num_simulated_tasks(whole.candidate)
    monkeypatch.setattr(orders, "MOST_TASKS", 0)
    prolonged = evaluated(parts, schedule, 50)
    assert orders.num_simulated_tasks(prolonged.candidate) < num_tasks
    assert prolonged.seconds == pytest.approx(whole.seconds, rel=0.03)
    assert prolonged.prediction.memory.residuals == pytest.approx(whole.prediction.memory.residuals, rel=0.2)
