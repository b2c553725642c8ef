"""The public functions: valid arguments of each, and what parameters take where their names do not say it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import cluster
import mpmd
import mpmd.simulate.compare
from cluster.mesh import ClusterMesh
from cluster.protocol.process_info import ProcessPlacement
from mpmd.ir.reshard import GroupShape
from mpmd.ir.routes import Topology
from mpmd.ir.tasks import Task
from mpmd.planner.choice import Choice
from mpmd.schedules import ALL_FAMILIES, check_schedule
from tests.support.wrong_arguments import Public


def add_one(x):
    return x + 1.0


def loss(w, x):
    return jnp.sum(w * x)


def batch():
    return jnp.asarray(BATCH)


def profile_of(step):
    """A profile of a step that has not run."""
    return mpmd.Profile(step.plan, step.topology, (), {}, {}, frozenset())


LISTS = mpmd.GPipe(2).tasks(2)
SIMULATION = mpmd.simulate.simulate(LISTS)
TIMES = {"fwd": 1.0, "bwd": 2.0, "bwdA": 1.0, "bwdW": 1.0}
LINK = mpmd.simulate.Link()
BATCH = np.zeros((6, 2), np.float32)
CLUSTER = {
    "nodes": 1,
    "devices_per_node": 2,
    "memory": 1e9,
    "flops": 1e12,
    "memory_bandwidth": 1e10,
    "device_link": LINK,
    "node_link": LINK,
    "kind": "H100",
}
GRADIENT = dict.fromkeys(("schedule", "aux_reduction"), "special?") | {
    "num_microbatches": "count?",
    "batch_argnums": "positions?",
    "reduction": "special",
}
"""The options of ``mpmd.grad``, which it hands on."""


def of_batch(function: Callable, *names: str) -> Callable:
    """A function that also takes the arguments of a step, with the batch for them."""

    @functools.wraps(function)
    def call(**arguments):
        return function(*(arguments.pop(name) for name in names), BATCH, **arguments)

    return call


@functools.cache
def here() -> SimpleNamespace:
    """Groups of one device, and a step on them in all its forms."""
    mesh = mpmd.MpmdMesh(Mesh(np.array(jax.devices()[:1]), ("stage",)), "stage")
    step = mpmd.jit(add_one, mesh)
    return SimpleNamespace(mesh=mesh, step=step, lowered=step.lower(BATCH), loaded=step.compile(BATCH))


def two_parts() -> mpmd.AbstractMpmdMesh:
    """Groups that are only described."""
    return mpmd.AbstractMpmdMesh({"stage": 2}, "stage", parts={"one": 1, "other": 1})


def cluster_mesh() -> ClusterMesh:
    """A mesh on Ray of which nothing runs."""
    topology = Topology((GroupShape({"stage": 1}),) * 4)
    return ClusterMesh(topology, "stage", {}, "cpu", None, ProcessPlacement((), {}), {}, [], [], lambda: None)  # type: ignore[arg-type]


def choice() -> Choice:
    """A choice of which nothing is known but what its methods look at first."""
    return Choice((), None, 0, None, None, None, (), 0.08, (), add_one, {}, None, ())  # type: ignore[arg-type]


def schedules() -> list[Public]:
    """The classes of schedules, and their methods."""
    found = []
    for name, family in ALL_FAMILIES.items():
        made = family.build(4)
        sizes = {"num_stages": made.num_stages, "mpmd_dim": made.mpmd_dim}
        known = sizes | {"slices": 1}
        taken = known.keys() & inspect.signature(family.schedule).parameters
        limit = {"memory_limit": "count or counts?"} if name == "ListSchedule" else {}
        found += [
            Public(family.schedule, {each: known[each] for each in taken}, limit, name),
            Public(family.schedule.of_size, sizes, alias=f"{name}.of_size"),
            Public(made.tasks, {"num_microbatches": 8}, alias=f"{name}.tasks"),
        ]
        if hasattr(made, "stages_of"):
            found.append(Public(made.stages_of, {"mpmd_idx": 1}, alias=f"{name}.stages_of"))
    custom = mpmd.CustomSchedule(LISTS)
    return [
        *found,
        Public(mpmd.CustomSchedule, {"lists": LISTS}),
        Public(custom.from_text, {"text": "F0 B0"}),
        Public(custom.from_file),
        Public(custom.tasks, {"num_microbatches": 2}),
        Public(mpmd.TaskTimes),
        Public(mpmd.TaskTimes().of, {"task": Task("fwd", 0, 0)}, {"task": "special"}),
        Public(check_schedule, {"tasks": LISTS, "num_stages": 2, "num_microbatches": 2}),
    ]


def of_simulations() -> list[Public]:
    """What simulates and draws."""
    path = "unused.svg"
    sizes = dict.fromkeys(("kinds", "tasks", "fused", "outside", "links"), "sizes")
    return [
        Public(mpmd.simulate.Link),
        Public(mpmd.simulate.Costs, {}, sizes),
        Public(mpmd.simulate.Costs.measured, {"events": ()}),
        Public(mpmd.simulate.simulate, {"program": LISTS}),
        Public(
            mpmd.simulate.compare.compare,
            {"mpmd_dim": 2, "num_microbatches": 2, "times": TIMES},
            {"times": "mapping"},
        ),
        Public(mpmd.render.chrome_trace, {"source": SIMULATION}),
        Public(mpmd.render.schedule_grid, {"tasks": LISTS, "costs": mpmd.simulate.Costs()}),
        Public(mpmd.render.draw_timeline, {"source": SIMULATION, "path": path}),
        Public(
            mpmd.render.draw_comparison,
            {"simulations": {"GPipe": SIMULATION}, "path": path},
        ),
    ]


def of_steps() -> list[Public]:
    """What steps are written with, compiled by and asked."""
    there, path = here(), {"path": "nowhere"}
    jitted = {"fun": add_one, "mpmd_mesh": there.mesh}
    loop, mark, every = {"fun": add_one, "operation": mpmd.Add}, {"x": BATCH}, {"every": "count or counts?"}
    part, tree = {"name": "one"}, {"tree": BATCH}
    return [
        Public(mpmd.jit, jitted),
        Public(mpmd.mpmd_jit_with_loop, jitted, alias="mpmd_jit_with_loop"),
        Public(mpmd.treduce, {**loop, "xs": BATCH}),
        Public(mpmd.treduce_i, {**loop, "length": 2}),
        Public(mpmd.Concat),
        Public(mpmd.value_and_grad, {"fun": loss}),
        Public(mpmd.grad, {"fun": loss}, GRADIENT),
        Public(mpmd.auto_marks, {"loss_fn": loss}),
        Public(mpmd.per_group, {"fun": loss}),
        Public(mpmd.mark_stage_end, mark, every),
        Public(mpmd.mark_pipeline_boundary, mark, every, "mark_pipeline_boundary"),
        Public(mpmd.pipeline_enter_stage, mark, every, "pipeline_enter_stage"),
        Public(mpmd.microbatches, {"batch": BATCH}),
        Public(mpmd.stage_ends, {"num_layers": 8, "num_stages": 4}),
        Public(mpmd.slice_bounds, {"length": 8, "slices": 2, "attention_share": 0.5}),
        Public(mpmd.slices, {**tree, "bounds": (0, 1, 2)}),
        Public(mpmd.to_host, tree, {"tree": "anything"}),
        Public(
            mpmd.MpmdMesh,
            {"jax_mesh": there.mesh.jax_mesh, "mpmd_axis_name": "stage"},
            {"mpmd_axis_name": "special", "parts": "sizes?"},
        ),
        Public(
            mpmd.AbstractMpmdMesh,
            {"shape": {"stage": 2}, "mpmd_axis_name": "stage"},
            {"mpmd_axis_name": "special"},
        ),
        Public(two_parts().part, part, {"name": "special"}, "MpmdMesh.part"),
        Public(two_parts().part, part, {"name": "special"}, "ClusterMesh.part"),
        Public(mpmd.reshard, {**tree, "to": there.loaded}, {"to": "special"}),
        Public(mpmd.explain, {"step": there.lowered}),
        Public(mpmd.explain(there.lowered).leaf, {"path": "args[0]"}),
        Public(
            of_batch(mpmd.check, "step", "reference"),
            {"step": there.step, "reference": add_one},
        ),
        *(
            Public(step.simulate, alias=f"{type(step).__name__}.simulate")
            for step in (there.lowered, there.loaded)
        ),
        Public(there.lowered.compile),
        Public(there.loaded.init, {"fun": batch}),
        *(
            public
            for step in (there.step, there.loaded)
            for public in (
                Public(of_batch(step.profile), {"trace_dir": "traces"}),
                Public(
                    of_batch(step.capture),
                    {"task": "after_0", "to": "captured"},
                ),
            )
        ),
        Public(mpmd.replay.load, {"directory": "captured"}, alias="replay.load"),
        Public(profile_of(there.lowered).save, path),
        Public(profile_of(there.lowered).write_html, path),
        Public(mpmd.Profile.load, path),
        Public(mpmd.metrics, {"step": there.step, "write": print}),
        Public(mpmd.collective_seconds),
        Public(there.loaded.restore, path),
        Public(there.loaded.argument_leaves),
        Public(mpmd.save, {**path, **tree}, {"tree": "anything"}),
        Public(mpmd.save_async, {**path, **tree}, {"tree": "anything"}),
        Public(mpmd.checkpoint.restore, {**path, "target": BATCH}),
        Public(mpmd.checkpoint.restore_args, {"target": BATCH}),
    ]


def of_clusters() -> list[Public]:
    """What chooses for a cluster, and what runs on one."""
    described = mpmd.Cluster(**CLUSTER)
    pools = {"pools": (described,)}
    numbers = ("operations", "nbytes_of_products", "nbytes_beside")
    return [
        Public(
            of_batch(mpmd.plan, "step"),
            {"step": add_one, "cluster": described, "measure": 0, "memory_margin": 0.08},
            {
                "groups": "count?",
                "measure": "count",
                "static_argnums": "positions?",
                "static_argnames": "text?",
            },
        ),
        Public(mpmd.Cluster, CLUSTER),
        Public(described.save, {"path": "unused.json"}, alias="Cluster.save"),
        Public(mpmd.Cluster.of, pools),
        Public(mpmd.HeterogeneousCluster, {**pools, "link": LINK}),
        Public(mpmd.Cluster.load, {"path": "nowhere"}),
        Public(mpmd.Cluster.preset, {"name": "h100"}, {"name": "special"}),
        Public(mpmd.cost, {"fun": add_one, "dimensions": "ab->ab", "divides": "a"}),
        Public(described.part, {"num_devices": 1}, alias="Cluster.part"),
        Public(
            described.seconds,
            dict.fromkeys(numbers, 1.0),
            dict.fromkeys(numbers, "number or array"),
            "Cluster.seconds",
        ),
        Public(mpmd.Cluster.from_ray),
        Public(cluster.describe),
        Public(mpmd.Cluster.of_this_process, {"measure": True}),
        Public(choice().mesh),
        Public(choice().stage_profile),
        Public(choice().jit),
        Public(
            cluster.launch,
            {"mesh_shape": {"stage": 2}, "mpmd_axis": "stage"},
            {"compilation_cache": "text?"},
        ),
        Public(cluster.Recovery, {}, {"share_after": "amount?"}),
        Public(cluster_mesh().replace, {"part": "sampler"}, {"part": "special"}),
        Public(cluster_mesh().resize, {"num_places": 2}),
        Public(cluster_mesh().find_nan),
    ]


def public_functions() -> list[Public]:
    """All of them."""
    return [*schedules(), *of_simulations(), *of_steps(), *of_clusters()]
