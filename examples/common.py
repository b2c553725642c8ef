"""The examples' common parts: the groups of a pipeline, and checks against plain JAX."""

import argparse
import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import mpmd

TRANSPORTS = ("auto", "shared_memory", "network", "device", "object_store")


def add_mesh_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--ray`` and the options of a Ray cluster to an example that runs in one process by default."""
    parser.add_argument("--ray", action="store_true", help="Ray actors instead of one process")
    add_ray_arguments(parser)


def parse_steps(description: str, argv: list[str] | None) -> argparse.Namespace:
    """Reads the number of steps, and the arguments of ``add_mesh_arguments``, from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="train steps (default: 10)")
    add_mesh_arguments(parser)
    return parser.parse_args(argv)


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the cluster that groups on Ray are on, and what moves arrays between them."""
    add = parser.add_argument
    add("--address", help="the Ray cluster to join, e.g. 'auto'; by default a local one is started")
    add("--transport", choices=TRANSPORTS, default="auto", help="what moves arrays between groups on Ray")


def add_group_arguments(parser: argparse.ArgumentParser, data: int = 1, model: int = 1) -> None:
    """Adds the sizes of a group's submesh, with these defaults, and the processes of a group."""
    add = parser.add_argument
    add("--data", type=int, default=data, help=f"devices of a group along the batch (default: {data})")
    add("--model", type=int, default=model, help=f"devices of a group that share weights (default: {model})")
    add("--processes", type=int, default=1, help="processes of each group, on Ray (default: 1)")


def check_group_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace, on_ray: bool) -> None:
    """Exits with one line if the arguments of ``add_group_arguments`` do not fit together."""
    for name in ("data", "model", "processes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    devices = args.data * args.model
    if devices % args.processes:
        parser.error(f"the {devices} devices of a group do not divide over --processes {args.processes}")
    if args.processes > 1 and not on_ray:
        parser.error("--processes is for groups on Ray")


def mesh_axes(args: argparse.Namespace, num_groups: int) -> dict[str, int]:
    """The axes of the whole mesh of an example with ``add_group_arguments``."""
    return {"stage": num_groups, "data": args.data, "model": args.model}


def fake_devices(count: int) -> None:
    """Has JAX present the CPU as ``count`` devices, unless ``JAX_NUM_CPU_DEVICES`` already says how many.

    JAX reads the number when it first needs a device: call this before any array is made.
    """
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", count)


def open_mesh(
    axes: dict[str, int],
    on_ray: bool,
    address: str | None = None,
    processes: int = 1,
    transport: str = "auto",
    recover: bool = False,
):
    """A context manager that yields the MPMD mesh; its ``"stage"`` axis counts the groups.

    On Ray every group is an actor, or one for each of its ``processes``; with ``recover`` it is replaced when
    it dies. In process a group is some of this process's devices: real ones if there are enough, else the
    fake ones of ``fake_devices``.
    """
    if on_ray:
        # One process is the default, and so is what the GPUs of the nodes make necessary.
        per_group = processes if processes > 1 else None
        recovery = mpmd.Recovery() if recover else None
        mesh = mpmd.launch(
            axes,
            mpmd_axis="stage",
            processes_per_group=per_group,
            address=address,
            transport=transport,
            recovery=recovery,
        )
        return _with_transports_shown(mesh)
    count = math.prod(axes.values())
    devices = jax.devices() if jax.device_count() >= count else jax.devices("cpu")
    if len(devices) < count:
        raise SystemExit(f"{axes} needs {count} devices; JAX has {len(devices)}")
    devices = np.array(devices[:count]).reshape(tuple(axes.values()))
    return mpmd.MpmdMesh(jax.sharding.Mesh(devices, tuple(axes)), "stage")


def open_parts(
    parts: Mapping[str, Mapping[str, int]], on_ray: bool, address: str | None = None, transport: str = "auto"
):
    """As ``open_mesh``, for a mesh of parts: for each its shape, whose ``"stage"`` counts its groups."""
    if on_ray:
        mesh = mpmd.launch(parts=parts, mpmd_axis="stage", address=address, transport=transport)
        return _with_transports_shown(mesh)
    groups = [{**shape, "stage": 1} for shape in parts.values() for _ in range(shape["stage"])]
    return _groups_here(groups, parts={name: shape["stage"] for name, shape in parts.items()})


def open_groups(groups: Sequence[Mapping[str, int]], on_ray: bool, transport: str = "auto"):
    """As ``open_mesh``, for groups of different shapes: for each the sizes of its axes, 1 where not named."""
    if on_ray:
        return _with_transports_shown(mpmd.launch(groups=groups, transport=transport))
    return _groups_here(groups)


def _groups_here(groups: Sequence[Mapping[str, int]], parts: Mapping[str, int] | None = None):
    """Groups of different shapes, of devices of this process."""
    axes = tuple({axis: None for group in groups for axis in group})
    shapes = [tuple(group.get(axis, 1) for axis in axes) for group in groups]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    if ends[-1] > jax.device_count():
        raise SystemExit(f"{groups} need {ends[-1]} devices; JAX has {jax.device_count()}")
    devices = np.split(np.array(jax.devices()[: ends[-1]]), ends[:-1])
    meshes = [
        jax.sharding.Mesh(of_group.reshape(shape), axes)
        for of_group, shape in zip(devices, shapes, strict=True)
    ]
    return mpmd.MpmdMesh(meshes, parts=parts)


def _with_transports_shown(mesh):
    """The mesh of groups on Ray; prints what moves arrays between them."""
    between = sorted(set(mesh.transports.values())) or ["nothing: there is one group"]
    print(f"between groups arrays are moved by {', '.join(between)}")
    return mesh


@contextlib.contextmanager
def ray_connection(on_ray: bool, address: str | None) -> Iterator[None]:
    """One connection with Ray for all meshes that are opened within it; nothing in one process."""
    if not on_ray:
        yield
        return
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    ray.init(address=address) if address else ray.init(address="local", include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()


def measured_cluster(on_ray: bool, num_devices: int, **resources: Any) -> mpmd.Cluster:
    """The devices at hand, with their measured rates; ``resources`` as of ``mpmd.Cluster.from_ray``."""
    if on_ray:
        return mpmd.Cluster.from_ray(devices_per_node=num_devices, measure=True, **resources)
    return mpmd.Cluster.of_this_process(jax.devices()[:num_devices], measure=True, **resources)


def assert_close(name: str, actual, expected, relative: float, absolute: float | None = None) -> None:
    """Prints the largest relative error of a leaf, and raises if it is over ``relative``, naming the leaf.

    The error of a leaf is the norm of its difference, over the norm of the expected leaf: gradients and
    second moments are small, and an absolute limit that suits weights would let any of them pass. Integers
    are to be equal. Both pytrees have the same structure, shapes and dtypes. ``absolute`` also limits the
    difference of each element.
    """
    if absolute is not None:
        difference = max_difference(actual, expected)
        print(f"{name}: max |difference| {difference:.1e} (limit {absolute:.0e})")
        if not difference <= absolute:  # also true of NaN
            raise AssertionError(f"{name} differ by {difference:.1e}, more than {absolute:.0e}")
    errors = relative_errors(actual, expected)
    worst = max(errors, key=lambda leaf: (np.isnan(errors[leaf]), errors[leaf]))
    print(f"{name}: largest relative error of a leaf {errors[worst]:.1e} (limit {relative:.0e})")
    if not errors[worst] <= relative:  # also true of NaN
        leaf = f" of {worst}" if worst else ""
        raise AssertionError(f"{name}: relative error{leaf} is {errors[worst]:.1e}, more than {relative:.0e}")


def max_difference(actual, expected) -> float:
    """The largest elementwise difference of two pytrees of arrays of the same structure."""
    differences = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), actual, expected)
    return float(np.max(jax.tree.leaves(differences)))


def relative_errors(actual, expected) -> dict[str, float]:
    """The relative error of each leaf, by its path; where zero is expected, infinity for anything else."""
    structures = jax.tree.structure(actual), jax.tree.structure(expected)
    if structures[0] != structures[1]:
        raise AssertionError(f"the structure is {structures[0]}, not {structures[1]}")
    errors = {}
    leaves = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, left), right in leaves:
        left, right, leaf = np.asarray(left), np.asarray(right), jax.tree_util.keystr(path)
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            raise AssertionError(f"{leaf} is {left.dtype}{left.shape}, not {right.dtype}{right.shape}")
        errors[leaf] = _relative_error(left, right)
    return errors


def _relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    if np.array_equal(actual, expected):
        return 0.0
    if not jax.numpy.issubdtype(expected.dtype, np.inexact):
        return math.inf
    wide = np.result_type(expected.dtype, np.float64)
    norm = np.linalg.norm(expected.astype(wide))
    difference = np.linalg.norm(actual.astype(wide) - expected.astype(wide))
    return float(difference / norm) if norm else math.inf
