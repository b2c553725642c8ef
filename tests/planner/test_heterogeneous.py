"""Clusters of several kinds of devices: groups lie in one pool each, and slower ones have fewer layers."""

import dataclasses
import functools
import json

import pytest

from mpmd.planner.candidate import Candidate
from mpmd.planner.cluster import Cluster, HeterogeneousCluster
from mpmd.planner.collectives import DeviceRange, device_ranges_of, message_link, shards_on_a_node
from mpmd.planner.constraints import Constraints
from mpmd.planner.curves import Curve
from mpmd.planner.presets import PRESETS
from mpmd.planner.search.formula import evaluate
from mpmd.planner.search.multi_loop import search_loops
from mpmd.planner.search.search import search
from mpmd.planner.search.stage_profile import stage_profile
from mpmd.planner.search.stages import CostModel
from mpmd.planner.submesh import Submesh
from mpmd.schedules import Std1F1B
from mpmd.simulate import Link
from tests.support.profiles import layer, profile

LINK = Link(1e-6, 1e10)
FAST = Cluster(1, 2, 80e9, 3e14, 2e12, Link(1e-6, 1e11), kind="fast")
SLOW = dataclasses.replace(FAST, flops=1e14, kind="slow")
SIXTEEN = profile(tuple(layer(f"layer {i}", 1e12, weights=10**6) for i in range(16)), rows=32)
USUAL = Constraints.of(schedule="Std1F1B")
FOUR_GROUPS = Constraints.of(groups=4, schedule="Std1F1B")


def two_and_two(fast=FAST, slow=SLOW, link=LINK):
    """A cluster of two fast devices and two slow ones."""
    return Cluster.of([fast, slow], link=link)


# The search.


@functools.cache
def on_four_groups():
    """The rows of a search for groups of a device each, of which two are fast."""
    return search(SIXTEEN, two_and_two(), FOUR_GROUPS)


@functools.cache
def on_fast_devices():
    """The rows of a search for the fast devices alone."""
    return search(SIXTEEN, FAST, USUAL)


def test_slower_groups_have_fewer_layers_in_proportion():
    # 6 : 6 : 2 : 2 of 16 layers is 3 : 3 : 1 : 1.
    best = on_four_groups()[0].candidate
    pools = [submesh.pool for submesh in best.submeshes]
    layers = sorted(zip(pools, best.layers_per_stage, strict=True))
    assert layers == [("fast", 6), ("fast", 6), ("slow", 2), ("slow", 2)]


def test_the_step_is_shorter_than_with_equal_layers_and_than_on_the_fast_devices():
    cluster = two_and_two()
    chosen = on_four_groups()[0]
    equal = dataclasses.replace(chosen.candidate, layers_per_stage=(4,) * 4)
    assert chosen.prediction.seconds < 0.7 * evaluate(CostModel(SIXTEEN, cluster), equal).seconds
    open_rows = search(SIXTEEN, cluster, USUAL)
    fast_alone = on_fast_devices()[0].prediction.seconds
    assert open_rows[0].prediction.seconds <= chosen.prediction.seconds
    assert open_rows[0].prediction.seconds < 0.85 * fast_alone
    assert {submesh.pool for submesh in open_rows[0].candidate.submeshes} == {"fast", "slow"}


def test_the_memory_of_a_row_is_that_of_the_group_that_lacks_most():
    small = dataclasses.replace(SLOW, memory=1e7)
    candidate = Candidate(
        (12, 4), (Submesh(pool="fast"), Submesh(pool="slow")), Std1F1B(2), 8, remat=False, fsdp=False
    )
    memory = evaluate(CostModel(SIXTEEN, two_and_two(slow=small)), candidate).prediction.memory
    same = evaluate(CostModel(SIXTEEN, two_and_two()), candidate).prediction.memory
    assert (memory.group, same.group) == (1, 0)


def test_loops_share_groups_in_their_pools():
    later = dataclasses.replace(SIXTEEN, decision_index=1, layers=SIXTEEN.layers[:8])
    fixed = dataclasses.replace(FOUR_GROUPS, num_microbatches=16)
    rows = search_loops([SIXTEEN, later], two_and_two(), [fixed, fixed], exhaustive=False)
    best = rows[0].candidate
    assert [submesh.pool for submesh in best.submeshes].count("slow") == 2
    assert best.later[0].submeshes == best.submeshes


def test_submeshes_that_are_fixed_are_in_the_pools_that_have_room():
    submesh = ({"data": 2}, {"data": 1}, {"data": 1})
    best = search(SIXTEEN, two_and_two(), dataclasses.replace(USUAL, submesh=submesh))[0].candidate
    assert [dict(s)["data"] for s in best.submeshes] == [2, 1, 1]
    assert len({s.pool for s in best.submeshes[1:]}) == 1 != len({s.pool for s in best.submeshes})
    with pytest.raises(ValueError, match="no way to run the step as fixed on 4 devices"):
        search(SIXTEEN, two_and_two(), Constraints.of(submesh={"data": 4}))


def test_stage_profiles_say_the_pool():
    row = on_four_groups()[0]
    table = stage_profile(SIXTEEN, two_and_two(), row.candidate)
    assert [stage.submesh for stage in table.chosen] == [*row.candidate.submeshes]
    assert "pool" in str(table).splitlines()[2] and "slow" in str(table)
    assert "pool" not in str(stage_profile(SIXTEEN, FAST, on_fast_devices()[0].candidate))


# Links and ranges.


def test_groups_are_on_consecutive_devices_of_their_pool():
    submeshes = tuple(Submesh(data=2, pool=pool) for pool in ("fast", "slow", "fast"))
    assert [device_range.start for device_range in device_ranges_of(submeshes)] == [0, 0, 2]


def test_messages_between_pools_take_the_link_between_them():
    cluster = two_and_two()
    fast, slow, other = (
        DeviceRange(start, Submesh(pool=pool)) for start, pool in ((0, "fast"), (0, "slow"), (1, "slow"))
    )
    assert message_link(cluster, fast, slow) == LINK
    assert message_link(cluster, slow, other) == SLOW.device_link
    assert message_link(cluster, slow, slow) == Link()
    both = DeviceRange(0, Submesh(data=2, pool="slow"))
    assert message_link(cluster, fast, both).bandwidth == LINK.bandwidth / 2
    assert shards_on_a_node(cluster, both, {"data"}) == 2


# The description.


def test_a_cluster_of_several_kinds_is_read_as_it_was_written(tmp_path):
    fast = dataclasses.replace(FAST, rates={"product bfloat16": Curve(3e14, 1e9)})
    cluster = two_and_two(fast)
    cluster.save(tmp_path / "cluster.json")
    loaded = Cluster.load(tmp_path / "cluster.json")
    assert isinstance(loaded, HeterogeneousCluster) and loaded == cluster
    assert loaded.pools[0].rates == fast.rates


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pools": []}, "pools is empty"),
        (
            {"pools": [{"nodes": 2}]},
            r"pools\[0\]: it lacks devices_per_node, flops, memory",
        ),
        ({"memory": 3}, "it has memory; it may have pools, link"),
    ],
)
def test_a_file_that_is_none_of_pools_is_refused(tmp_path, change, text):
    path = tmp_path / "cluster.json"
    two_and_two().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((ValueError, TypeError), match=text):
        Cluster.load(path)


@pytest.mark.parametrize(
    ("pools", "link", "text"),
    [
        ([], LINK, "pools is empty: give a cluster for each kind of devices"),
        (FAST, LINK, "pools must be clusters of one kind each"),
        ([FAST, 3], LINK, r"pools\[1\] must be an mpmd.Cluster of one kind of devices, not 3"),
        ([FAST, dataclasses.replace(SLOW, kind="")], LINK, r"pools\[1\] needs a kind, .* kind='H100'"),
        (
            [Cluster.of([FAST, SLOW], link=LINK), FAST],
            LINK,
            r"pools\[0\] must be an mpmd.Cluster of one kind",
        ),
        ([FAST, FAST], LINK, r"pools\[1\] and pools\[0\] are both of the kind 'fast'"),
        ([FAST, SLOW], None, "link must be given between 2 pools"),
        ([FAST, SLOW], 3, "link must be an mpmd.simulate.Link of seconds and bytes per second, .* not 3"),
        (
            [FAST, dataclasses.replace(SLOW, holding="kept")],
            LINK,
            r"hold messages in different places \(fast 'receiver', slow 'kept'\): give all the same holding",
        ),
        (
            [FAST, dataclasses.replace(SLOW, flash_attention=True)],
            LINK,
            r"one attention \(fast False, slow True\): give all the same flash_attention",
        ),
        ([dataclasses.replace(FAST, nodes=2**19, node_link=LINK), SLOW], LINK, "devices"),
        ([FAST, SLOW], Link(float("inf"), 1e9), "the latency of link must be finite, not inf"),
    ],
)
def test_what_is_no_cluster_is_refused(pools, link, text):
    with pytest.raises((ValueError, TypeError), match=text):
        Cluster.of(pools, link=link)


def test_presets_make_pools():
    pools = [Cluster.preset(name) for name in PRESETS if name != "h100-sxm"]  # which are H100, too
    names = ("A100", "A100-40G", "H100", "H200", "B200", "L40S", "GeForce-RTX-4090")
    names += ("CPU", "TPU-V5LITEPOD", "TPU-V5P", "TPU-V6E")
    assert Cluster.of(pools, link=LINK).pool_names == names
