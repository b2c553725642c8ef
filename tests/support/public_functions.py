"""The public functions: valid arguments of each, and what each of its parameters takes."""

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
from cluster.protocol.process_info import Placement
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
    "nodes": ("count", 1),
    "devices_per_node": ("count", 2),
    "memory": ("amount", 1e9),
    "flops": ("amount", 1e12),
    "memory_bandwidth": ("amount", 1e10),
    "device_link": ("special", LINK),
    "node_link": ("special", LINK),
    "task_overhead": ("amount",),
    "alone": ("amount",),
    "holding": ("special",),
    "rates": ("special",),
    "kernel_floor": ("amount",),
    "collective_floor": ("amount",),
    "merges_all_reduces": ("flag",),
    "overlaps_gathers": ("flag",),
    "accumulates_products": ("flag",),
    "flash_attention": ("flag",),
    "kind": ("text", "H100"),
}
COSTS = {
    **dict.fromkeys(("kinds", "tasks", "fused", "outside", "links"), ("sizes",)),
    "link": ("special",),
    "message_bytes": ("amount",),
    "blocking": ("flag",),
    "atomic": ("flag",),
    "at_once": ("amount",),
    "held_for_bwdw": ("amount",),
}
OF_SCHEDULES = {
    "num_stages": "count",
    "mpmd_dim": "count",
    "fuse_steady_state": "flag",
    "split_backward": "flag",
    "slices": "count",
    "eager": "flag",
    "placement": "special",
    "times": "special",
    "memory_limit": "count or counts?",
}
JIT = {
    "fun": ("special?", add_one),
    "in_specs": ("special?",),
    "out_specs": ("special?",),
    "static_argnums": ("positions?",),
    "static_argnames": ("text?",),
    "donate_argnums": ("positions?",),
    "partial_sums": ("special",),
    "gather": ("special",),
    "donate_argnames": ("text?",),
    "in_shardings": ("special?",),
    "out_shardings": ("special?",),
    "kwarg_shardings": ("special?",),
}
GRADIENT = {
    "fun": ("special", loss),
    "argnums": ("positions",),
    "has_aux": ("flag",),
    "num_microbatches": ("count?",),
    "schedule": ("special?",),
    "batch_argnums": ("positions?",),
    "reduction": ("special",),
    "aux_reduction": ("special?",),
}
MARK = {
    "x": ("special", BATCH),
    "name": ("text?",),
    "every": ("count or counts?",),
    "num_stages": ("count?",),
}
LOOP = {
    "fun": ("special", add_one),
    "schedule": ("special?",),
    "operation": ("special", mpmd.Add),
    "carry": ("numbers?",),
    "part": ("text?",),
}
LAUNCH = {
    "mesh_shape": ("special", {"stage": 2}),
    "mpmd_axis": ("special", "stage"),
    "groups": ("special?",),
    "parts": ("special?",),
    "axis_types": ("special?",),
    "processes_per_group": ("special?",),
    "platform": ("text?",),
    "cpus_per_group": ("amount?",),
    "gpus_per_group": ("amount?",),
    "accelerator_types": ("text?",),
    "address": ("text?",),
    "runtime_env": ("mapping?",),
    "transport": ("special",),
    "encryption": ("flag?",),
    "compilation_cache": ("text?",),
    "recovery": ("special?",),
    "timeout": ("amount?",),
    "max_in_flight": ("count",),
    "step_timeout": ("amount?",),
    "stuck_after": ("amount?",),
    "load_timeout": ("amount?",),
    "capture": ("text?",),
}
DESCRIBE = {
    "address": ("text?",),
    "measure": ("flag",),
    "dtype": ("special",),
    "platform": ("text?",),
    "cpus_per_device": ("amount?",),
    "timeout": ("amount",),
}


def of_batch(function: Callable, *names: str) -> Callable:
    """A function that also takes the arguments of a step, with the batch for them."""

    @functools.wraps(function)
    def call(**arguments):
        return function(*(arguments.pop(name) for name in names), BATCH, **arguments)

    return call


PLAN = {
    "step": ("special", add_one),
    "cluster": (
        "special",
        mpmd.Cluster(**{name: value[0] for name, (_, *value) in CLUSTER.items() if value}),
    ),
    "kwargs": ("mapping?",),
    "groups": ("count?",),
    "num_layers": ("count?",),
    "num_stages": ("count?",),
    "layers_per_stage": ("counts?",),
    "schedule": ("special?",),
    "num_microbatches": ("count?",),
    "submesh": ("special?",),
    "remat": ("flag?",),
    "fsdp": ("flag?",),
    "sequence_parallel": ("flag?",),
    "in_shardings": ("special?",),
    "kwarg_shardings": ("special?",),
    "static_argnums": ("positions?",),
    "static_argnames": ("text?",),
    "donate_argnums": ("positions?",),
    "simulate": ("count",),
    "seconds": ("amount?",),
    "measure": ("count", 0),
    "memory_margin": ("special", 0.08),
}


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
    return ClusterMesh(topology, "stage", {}, "cpu", None, Placement((), {}), {}, [], [], lambda: None)  # type: ignore[arg-type]


def choice() -> Choice:
    """A choice of which nothing is known but what its methods look at first."""
    return Choice((), None, 0, None, None, None, (), 0.08, (), add_one, {}, None, ())  # type: ignore[arg-type]


def schedules() -> list[Public]:
    """The classes of schedules, and their methods."""
    found = []
    for name, family in ALL_FAMILIES.items():
        made = family.build(4)
        sizes = {"num_stages": ("count", made.num_stages), "mpmd_dim": ("count", made.mpmd_dim)}
        known = {**sizes, "slices": ("count", 1)}
        if name == "Seq1F1B":  # as many groups as stages, unless it says otherwise
            known["mpmd_dim"] = ("count?", made.mpmd_dim)
        kinds = {each: (OF_SCHEDULES[each],) for each in inspect.signature(family.schedule).parameters}
        found += [
            Public(name, family.schedule, {each: known.get(each, kind) for each, kind in kinds.items()}),
            Public(f"{name}.of_size", family.schedule.of_size, sizes),
            Public(f"{name}.tasks", made.tasks, {"num_microbatches": ("count", 8)}),
        ]
        if hasattr(made, "stages_of"):
            found.append(Public(f"{name}.stages_of", made.stages_of, {"mpmd_idx": ("count", 1)}))
    custom = mpmd.CustomSchedule(LISTS)
    return [
        *found,
        Public("CustomSchedule", mpmd.CustomSchedule, {"lists": ("special", LISTS), "slices": ("count",)}),
        Public("CustomSchedule.from_text", custom.from_text, {"text": ("text", "F0 B0")}),
        Public("CustomSchedule.from_file", custom.from_file, {"path": ("text",)}),
        Public("CustomSchedule.tasks", custom.tasks, {"num_microbatches": ("count", 2)}),
        Public(
            "TaskTimes",
            mpmd.TaskTimes,
            {**dict.fromkeys(("fwd", "bwd", "bwdA", "bwdW"), ("time or times",)), "hop": ("amount",)},
        ),
        Public("TaskTimes.of", mpmd.TaskTimes().of, {"task": ("special", Task("fwd", 0, 0))}),
        Public(
            "check_schedule",
            check_schedule,
            {
                "tasks": ("special", LISTS),
                "num_stages": ("count", 2),
                "num_microbatches": ("count", 2),
                "mpmd_dim": ("count?",),
                "slices": ("count",),
            },
        ),
    ]


def of_simulations() -> list[Public]:
    """What simulates and draws."""
    lists, path = ("special", LISTS), ("text", "unused.svg")
    costs = mpmd.simulate.Costs()
    return [
        Public("Link", mpmd.simulate.Link, {"latency": ("amount",), "bandwidth": ("amount",)}),
        Public("Costs", mpmd.simulate.Costs, COSTS),
        Public("Costs.measured", mpmd.simulate.Costs.measured, {"events": ("special", ())}),
        Public(
            "simulate",
            mpmd.simulate.simulate,
            {
                "program": lists,
                "costs": ("special?",),
                "steps": ("count",),
                "topology": ("special?",),
                "slices": ("count",),
            },
        ),
        Public(
            "compare",
            mpmd.simulate.compare.compare,
            {
                "mpmd_dim": ("count", 2),
                "num_microbatches": ("count", 2),
                "times": ("mapping", TIMES),
                "latency": ("amount",),
                "memory_limit": ("amount",),
                "stages_per_group": ("counts",),
                "slices": ("count",),
            },
        ),
        Public(
            "chrome_trace",
            mpmd.render.chrome_trace,
            {"source": ("special", SIMULATION), "path": ("text?",)},
        ),
        Public(
            "schedule_grid",
            mpmd.render.schedule_grid,
            {"tasks": lists, "costs": ("special?", costs), "slices": ("count",)},
        ),
        Public(
            "draw_timeline",
            mpmd.render.draw_timeline,
            {
                "source": ("special", SIMULATION),
                "path": path,
                "title": ("text?",),
                "of_plan": ("flag",),
                "ideal": ("special?",),
                "slices": ("count",),
            },
        ),
        Public(
            "draw_comparison",
            mpmd.render.draw_comparison,
            {
                "simulations": ("special", {"GPipe": SIMULATION}),
                "path": path,
                "title": ("text",),
                "memory_limit": ("amount?",),
            },
        ),
    ]


def of_steps() -> list[Public]:
    """What steps are written with, compiled by and asked."""
    there, jitted = here(), {**JIT, "mpmd_mesh": ("special", here().mesh)}
    argnum, path = ("argument", 0), ("text", "nowhere")
    sizes, tree = {"num_stages": ("count", 4)}, ("anything", BATCH)
    return [
        Public("jit", mpmd.jit, jitted),
        Public("mpmd_jit_with_loop", mpmd.mpmd_jit_with_loop, jitted),
        Public("treduce", mpmd.treduce, {**LOOP, "xs": ("special", BATCH), "axis": ("int",)}),
        Public("treduce_i", mpmd.treduce_i, {**LOOP, "length": ("count", 2)}),
        Public("Concat", mpmd.Concat, {"axis": ("int",)}),
        Public("value_and_grad", mpmd.value_and_grad, GRADIENT),
        Public("grad", mpmd.grad, {name: GRADIENT[name] for name in ("fun", "argnums", "has_aux")}),
        *(Public(f"grad({name})", mpmd.grad, {**GRADIENT, name: kind}) for name, kind in GRADIENT.items()),
        Public("auto_marks", mpmd.auto_marks, {"loss_fn": ("special", loss), "num_stages": ("count?",)}),
        Public("per_group", mpmd.per_group, {"fun": ("special", loss)}),
        Public("mark_stage_end", mpmd.mark_stage_end, MARK),
        Public("mark_pipeline_boundary", mpmd.mark_pipeline_boundary, MARK),
        Public("pipeline_enter_stage", mpmd.pipeline_enter_stage, MARK),
        Public("microbatches", mpmd.microbatches, {"batch": ("special", BATCH), "n": ("count?",)}),
        Public("stage_ends", mpmd.stage_ends, {"num_layers": ("count", 8), **sizes}),
        Public(
            "slice_bounds",
            mpmd.slice_bounds,
            {
                "length": ("count", 8),
                "slices": ("count", 2),
                "attention_share": ("special", 0.5),
                "multiple": ("count",),
            },
        ),
        Public(
            "slices",
            mpmd.slices,
            {"tree": ("special", BATCH), "bounds": ("special", (0, 1, 2)), "axis": ("int",)},
        ),
        Public("to_host", mpmd.to_host, {"tree": tree}),
        Public(
            "MpmdMesh",
            mpmd.MpmdMesh,
            {
                "jax_mesh": ("special", there.mesh.jax_mesh),
                "mpmd_axis_name": ("special", "stage"),
                "max_in_flight": ("count",),
                "parts": ("sizes?",),
                "capture": ("text?",),
            },
        ),
        Public(
            "AbstractMpmdMesh",
            mpmd.AbstractMpmdMesh,
            {
                "shape": ("special", {"stage": 2}),
                "mpmd_axis_name": ("special", "stage"),
                "parts": ("special?",),
            },
        ),
        Public("MpmdMesh.part", two_parts().part, {"name": ("special", "one")}),
        Public("ClusterMesh.part", two_parts().part, {"name": ("special", "one")}),
        Public(
            "reshard",
            mpmd.reshard,
            {
                "tree": ("special", BATCH),
                "to": ("special", there.loaded),
                "argnum": argnum,
                "dtype": ("special?",),
            },
        ),
        Public("explain", mpmd.explain, {"step": ("special", there.lowered)}),
        Public("Explanation.leaf", mpmd.explain(there.lowered).leaf, {"path": ("text", "args[0]")}),
        Public(
            "check",
            of_batch(mpmd.check, "step", "reference"),
            {"step": ("special", there.step), "reference": ("special", add_one), "steps": ("count",)},
        ),
        *(
            Public(
                f"{type(step).__name__}.simulate",
                step.simulate,
                {"costs": ("special?",), "steps": ("count",), "operations_per_second": ("amount",)},
            )
            for step in (there.lowered, there.loaded)
        ),
        Public("LoweredStep.compile", there.lowered.compile, {"mpmd_mesh": ("special?",)}),
        Public(
            "LoadedStep.init",
            there.loaded.init,
            {"fun": ("special", batch), "argnum": argnum},
        ),
        *(
            Public(
                f"{type(step).__name__}.profile",
                of_batch(step.profile),
                {"steps": ("count",), "trace_dir": ("text?", "traces")},
            )
            for step in (there.step, there.loaded)
        ),
        *(
            Public(
                f"{type(step).__name__}.capture",
                of_batch(step.capture),
                {"task": ("text", "after_0"), "to": ("text", "captured"), "mpmd_idx": ("count?",)},
            )
            for step in (there.step, there.loaded)
        ),
        Public("replay.load", mpmd.replay.load, {"directory": ("text", "captured")}),
        Public("Profile.save", profile_of(there.lowered).save, {"path": path}),
        Public(
            "Profile.write_html",
            profile_of(there.lowered).write_html,
            {"path": path, "title": ("text?",), "before": ("special?",)},
        ),
        Public("Profile.load", mpmd.Profile.load, {"path": path}),
        Public(
            "metrics",
            mpmd.metrics,
            {
                "step": ("special", there.step),
                "write": ("special", print),
                "examples": ("amount?",),
                "tokens": ("amount?",),
                "every": ("count",),
                "first_step": ("count",),
            },
        ),
        Public("collective_seconds", mpmd.collective_seconds, {"trace_dir": ("text",)}),
        Public("LoadedStep.restore", there.loaded.restore, {"path": path, "argnum": argnum}),
        Public("LoadedStep.argument_leaves", there.loaded.argument_leaves, {"argnum": argnum}),
        Public("save", mpmd.save, {"path": path, "tree": tree}),
        Public("save_async", mpmd.save_async, {"path": path, "tree": tree}),
        *(
            Public(
                name,
                getattr(mpmd.checkpoint, name),
                {**where, "target": ("anything", BATCH), "mesh": ("special?",)},
            )
            for name, where in (("restore", {"path": path}), ("restore_args", {}))
        ),
    ]


def of_clusters() -> list[Public]:
    """What chooses for a cluster, and what runs on one."""
    pools = (PLAN["cluster"][1],)
    described = {"measure": ("flag", True), "dtype": ("special",), "devices": ("special?",)}
    return [
        Public("plan", of_batch(mpmd.plan, "step"), PLAN),
        Public("Cluster", mpmd.Cluster, CLUSTER),
        Public("Cluster.save", PLAN["cluster"][1].save, {"path": ("text", "unused.json")}),
        Public("Cluster.of", mpmd.Cluster.of, {"pools": ("special", pools), "link": ("special?",)}),
        Public(
            "HeterogeneousCluster",
            mpmd.HeterogeneousCluster,
            {"pools": ("special", pools), "link": ("special", LINK)},
        ),
        Public("Cluster.load", mpmd.Cluster.load, {"path": ("text", "nowhere")}),
        Public("Cluster.preset", mpmd.Cluster.preset, {"name": ("special", "h100"), "nodes": ("count",)}),
        Public(
            "cost",
            mpmd.cost,
            {
                "fun": ("special", add_one),
                **dict.fromkeys(("forward", "backward"), ("amount",)),
                **dict.fromkeys(
                    ("operations", "nbytes", "backward_operations", "backward_bytes"), ("amount?",)
                ),
                "dimensions": ("text?", "ab->ab"),
                "divides": ("text?", "a"),
            },
        ),
        Public("Cluster.part", PLAN["cluster"][1].part, {"num_devices": ("count", 1)}),
        Public(
            "Cluster.seconds",
            PLAN["cluster"][1].seconds,
            dict.fromkeys(("operations", "nbytes_of_products", "nbytes_beside"), ("number or array", 1.0)),
        ),
        Public("Cluster.from_ray", mpmd.Cluster.from_ray, DESCRIBE),
        Public("describe", cluster.describe, {**DESCRIBE, "record_steps": ("special?",)}),
        Public(
            "Cluster.of_this_process", mpmd.Cluster.of_this_process, {**described, "devices": ("special?",)}
        ),
        Public("Choice.mesh", choice().mesh, {"devices": ("special?",)}),
        Public("Choice.stage_profile", choice().stage_profile, {"loop": ("count",)}),
        Public("Choice.jit", choice().jit, {"mesh": ("special",)}),
        Public("launch", cluster.launch, LAUNCH),
        Public(
            "Recovery",
            cluster.Recovery,
            {
                **dict.fromkeys(("every", "max_failures", "spares"), ("count",)),
                "share_after": ("amount?",),
                "verify_every": ("count?",),
                "on_corruption": ("text",),
                "parts": ("special?",),
            },
        ),
        Public(
            "ClusterMesh.replace",
            cluster_mesh().replace,
            {"part": ("special", "sampler"), "timeout": ("amount",)},
        ),
        Public(
            "ClusterMesh.resize",
            cluster_mesh().resize,
            {"num_places": ("count", 2), "timeout": ("amount",)},
        ),
        Public(
            "ClusterMesh.find_nan",
            cluster_mesh().find_nan,
            {"to": ("text?",), "nans": ("flag",), "infs": ("flag",)},
        ),
    ]


def public_functions() -> list[Public]:
    """All of them."""
    return [*schedules(), *of_simulations(), *of_steps(), *of_clusters()]
