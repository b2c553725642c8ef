"""What a search finds for models of known shape, and what it says of fixes and of what does not fit."""

import dataclasses
import functools

import pytest

from mpmd.language.remat import Remat
from mpmd.planner.constraints import Constraints
from mpmd.planner.reasons import complexity, may_be_as_fast, ranked
from mpmd.planner.search.exhaustive import is_small
from mpmd.planner.search.search import evaluated_rows, search, search_space
from mpmd.schedules import ForwardOnly, Std1F1B
from tests.support.profiles import a100s, gpt, layer, profile

SMALL = gpt(num_layers=6, width=1024, heads=16, vocabulary=32768, rows=32)
NODE = a100s(nodes=1)
FULL = (Remat.NOTHING_SAVEABLE,)


@functools.cache
def open_rows():
    """The rows of a search on a node, with nothing fixed."""
    return search(SMALL, NODE)


@pytest.mark.slow
def test_96_layers_on_512_devices_take_little_work():
    cluster = a100s(nodes=64)
    rows = evaluated_rows(search_space(gpt(), cluster, Constraints()))
    best = ranked(rows, cluster, 1)[0]
    assert len(rows) < 200
    assert not best.reason
    # 3.4e24 operations of the products, on 512 devices of 187 TFLOP/s, without recomputation.
    assert 35 < best.prediction.seconds < 55
    assert best.prediction.memory.total <= 80e9
    assert len(best.candidate.submeshes) > 1
    assert best.candidate.submeshes[0]["model"] > 1


def test_rows_are_in_order_and_have_the_alternatives():
    rows = open_rows()
    fitting = [row for row in rows if "does not fit" not in row.reason]
    assert [*rows[: len(fitting)]] == fitting
    seconds = [row.prediction.seconds for row in fitting]
    assert seconds == sorted(seconds)
    assert {row.label for row in rows} >= {"one device", "data parallel", "FSDP", "tensor parallel"}
    assert [row.reason == "" for row in rows] == [True] + [False] * (len(rows) - 1)


def test_values_that_skip_layers_are_counted():
    skipping = profile((layer("", 1e9, entering=10**6),) * 8, rows=256, skips=((0, 7, 10**8),))
    without = dataclasses.replace(skipping, skips=())
    constraints = Constraints(
        groups=2, layers_per_stage=(4, 4), schedule="Std1F1B", num_microbatches=8, submesh={}
    )
    one, other = (search(made, NODE, constraints)[0].prediction for made in (skipping, without))
    assert one.memory.messages > other.memory.messages
    assert one.seconds > other.seconds


@pytest.mark.parametrize("exhaustive", [True, False])
def test_equal_groups_with_a_usual_schedule_are_among_the_rows(exhaustive):
    made = gpt(num_layers=6, width=1024, heads=16, vocabulary=32768, rows=64)
    best, *rows = search(made, NODE, Constraints(groups=4, num_microbatches=32), exhaustive)
    plain = [row for row in rows if not any(complexity(row.candidate)[1:])]  # but for its pipeline
    assert any(complexity(best.candidate)[1:]) and may_be_as_fast(plain[0], best)
    assert plain[0].prediction.seconds < 1.05 * best.prediction.seconds, "not the best of its kind"


def test_a_schedule_of_a_size_fixes_stages_and_groups():
    for row in search(SMALL, NODE, Constraints(schedule=Std1F1B(4), submesh={"data": 2})):
        assert row.candidate.schedule == Std1F1B(4)
        assert [submesh["data"] for submesh in row.candidate.submeshes] == [2] * 4


@pytest.mark.parametrize("exhaustive", [True, False])
def test_each_group_has_the_submesh_that_is_fixed_for_it(exhaustive):
    submesh = ({"data": 4}, {"model": 2}, {})
    for row in search(SMALL, NODE, Constraints(submesh=submesh, schedule="Std1F1B"), exhaustive):
        assert row.candidate.schedule.mpmd_dim == 3
        sizes = [{k: n for k, n in own.items() if n > 1} for own in row.candidate.submeshes]
        assert sizes == [*submesh]


def test_marked_stages_stay_where_groups_of_different_sizes_are_tried():
    """Stages of unequal work, of which groups of different sizes would take fewer."""
    parts = tuple(layer("", 1e12 * work, weights=10**6) for work in (1, 1, 5, 1))
    made = profile(parts, 16, are_stages=True)
    rows = search(made, NODE, Constraints(groups=4), exhaustive=False)
    assert all(row.candidate.schedule.num_stages == 4 for row in rows)
    assert any(len({*map(str, row.candidate.submeshes)}) > 1 for row in rows), "none differ in size"


def test_without_backwards_there_are_forwards_alone():
    made = dataclasses.replace(SMALL, has_backward=False)
    best = search(made, NODE, Constraints(groups=2))[0]
    assert best.candidate.schedule.name == "ForwardOnly"
    assert best.prediction.memory.residuals == best.prediction.memory.gradients == 0
    made = profile((layer("", 1e9),) * 15, rows=32, has_backward=False)
    assert search(made, a100s(nodes=2), Constraints(schedule=ForwardOnly(15, 11)))


def test_groups_that_no_candidate_has_are_not_counted():
    fixed = Constraints(schedule="Std1F1B", num_stages=8, num_microbatches=32)
    assert not is_small(search_space(SMALL, a100s(nodes=8), fixed))


def test_groups_have_equally_many_devices_on_each_node():
    made, cluster = profile((layer("", 1e9),), rows=15), a100s(nodes=2)
    (divided,) = (row for row in search(made, cluster) if row.label == "data parallel")
    assert divided.candidate.submeshes[0]["data"] == 5
    with pytest.raises(ValueError, match="15 devices of a group do not divide over its nodes"):
        search(made, cluster, Constraints(submesh={"data": 15}))


@pytest.mark.parametrize(
    ("constraints", "texts"),
    [
        (Constraints(groups=9), ["groups=9 need a device each; the cluster has 8", "the step has 8 layers"]),
        (Constraints(layers_per_stage=(3, 3)), ["layers_per_stage=(3, 3) has 6 layers; the step has 8"]),
        (Constraints(num_stages=9), ["num_stages=9 needs as many layers; the step has 8"]),
        (Constraints(num_microbatches=3), ["num_microbatches=3 does not divide the 32 rows of the batch"]),
        (Constraints(schedule=Std1F1B(4), groups=2), ["has 4 groups, and groups were fixed to 2"]),
        (
            Constraints(schedule="Interleaved1F1B", groups=2, num_stages=3),
            ["mpmd_dim=2 takes num_stages=2, 4, 6"],
        ),
        (Constraints(schedule="ForwardOnly"), ["the step has backwards"]),
        (Constraints(submesh={"data": 4}, groups=4), ["would have 16 devices; the cluster has 8"]),
        (Constraints(submesh=({"data": 4}, {"data": 8})), ["would have 12 devices; the cluster has 8"]),
        (Constraints(submesh=({}, {}), groups=3), ["the devices of 2 groups, and there are to be 3"]),
        (Constraints(submesh={"model": 3}), ["model=3 does not divide 16"]),
        (Constraints(submesh={"sequence": 2}), ["the step has nothing to divide along sequence"]),
        (Constraints(submesh={"model": 2}, fsdp=True), ["along which submesh={'model': 2} has one device"]),
        (
            Constraints(groups=8, fsdp=True),
            ["fsdp=True needs a group of several devices; groups=8 have one each"],
        ),
        (Constraints(schedule="ZeroBubbleV", num_stages=3), ["ZeroBubbleV", "num_stages"]),
    ],
)
def test_contradictions_are_said_with_numbers(constraints, texts):
    with pytest.raises(ValueError) as raised:
        search(SMALL, NODE, constraints)
    for text in texts:
        assert text in str(raised.value)


def test_all_contradictions_are_said_at_once():
    with pytest.raises(ValueError) as raised:
        search(SMALL, NODE, Constraints(groups=9, num_microbatches=3, submesh={"model": 3}))
    assert len(str(raised.value).splitlines()) >= 4


def test_what_fits_nowhere_is_told_what_would_fit():
    cluster = dataclasses.replace(NODE, memory=3e8)
    with pytest.raises(
        ValueError, match=r"a device needs at least .* and has 286.1 MiB; .* nodes of 8 devices"
    ):
        search(SMALL, cluster)


def test_a_fix_that_keeps_a_step_from_fitting_is_named():
    cluster = dataclasses.replace(NODE, devices_per_node=256, memory=3e9)
    with pytest.raises(ValueError, match="another groups than 1"):
        search(SMALL, cluster, Constraints(groups=1, submesh={}))


@pytest.mark.slow
def test_a_schedule_of_more_stages_is_no_fix_for_layers_of_each_stage():
    cluster = dataclasses.replace(NODE, memory=5e8)
    fixed = Constraints(groups=2, num_stages=2, layers_per_stage=(2, 6), schedule="Interleaved1F1B")
    with pytest.raises(ValueError, match=r"another layers_per_stage than \(2, 6\) or 2 nodes"):
        search(SMALL, cluster, fixed)
