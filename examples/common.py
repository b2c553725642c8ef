"""What the examples share: where the groups of a pipeline live, and checks against plain JAX."""

import argparse
import os

import jax
import numpy as np

import mpmd

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def add_mesh_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--ray`` and ``--address`` to an example that runs in one process by default."""
    parser.add_argument("--ray", action="store_true", help="Ray actors instead of one process")
    parser.add_argument("--address", help="the Ray cluster to join with --ray; by default a local one")


def fake_devices(count: int) -> None:
    """Has XLA present the CPU as ``count`` devices, unless the user's ``XLA_FLAGS`` already say how many.

    XLA reads the flag when JAX first needs a device: call this before any array is made.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT_FLAG}={count}".strip()


def open_mesh(axes: dict[str, int], on_ray: bool, address: str | None = None):
    """A context manager that yields the MPMD mesh; its ``"stage"`` axis counts the groups.

    On Ray every group is an actor. In process a group is some of this process's devices: real ones
    if there are enough, else the fake ones of ``fake_devices``.
    """
    if on_ray:
        import cluster  # here, because examples that run in one process do not need Ray

        return cluster.launch(axes, mpmd_axis="stage", address=address)
    count = int(np.prod(list(axes.values())))
    devices = jax.devices() if jax.device_count() >= count else jax.devices("cpu")
    if len(devices) < count:
        raise SystemExit(f"{axes} needs {count} devices; XLA_FLAGS gives {len(devices)}")
    devices = np.array(devices[:count]).reshape(tuple(axes.values()))
    return mpmd.MpmdMesh(jax.sharding.Mesh(devices, tuple(axes)), "stage")


def assert_close(name: str, actual, expected, atol: float) -> None:
    """Prints the largest difference of two pytrees of arrays, and raises if it is over ``atol``."""
    difference = max_difference(actual, expected)
    print(f"{name}: max |difference| {difference:.1e} (limit {atol:.0e})")
    if not difference <= atol:  # also true of NaN
        raise AssertionError(f"{name} differ by {difference:.1e}, more than {atol:.0e}")


def max_difference(actual, expected) -> float:
    """The largest elementwise difference of two pytrees of arrays of the same structure."""
    differences = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), actual, expected)
    return float(np.max(jax.tree.leaves(differences)))
