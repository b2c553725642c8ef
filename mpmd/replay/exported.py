"""Runs the module of a task, once its operations were checked.

The files of ``jax.export`` itself take a package that JAX does not need. So the types of the task's operands
and results are in the record. Here JAX exports a function with the same types, which then gets the module in
place of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend import mlir as portable
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.compat import stable_custom_calls
from mpmd.replay.record import MODULE, MOST_BYTES, TaskRecord, ValueRecord
from mpmd.replay.values import dtype_of
from mpmd.util.guarded_files import naming, read_bytes
from mpmd.util.tables import first_few

_OF_THE_HOST = ("infeed", "outfeed", "send", "recv")
"""Operations that wait for another program."""


class DevicesError(ValueError):
    """JAX has other or fewer devices here than the task needs."""


def run_exported(directory: Path, record: TaskRecord, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a task's module for these operands.

    Raises: ``DevicesError`` where JAX has other or fewer devices, with the variable that changes that, if one
      does; ``ValueError`` for a module that JAX cannot run, or that may do more than compute.
    """
    devices = np.array(_devices(record.platform, record.num_devices))
    axes = dict(record.submesh)
    mesh = Mesh(devices.reshape(tuple(axes.values())), tuple(axes))
    path = directory / MODULE
    with naming(path):
        code = read_bytes(path, MOST_BYTES)
    with _refusing(path):
        faults = faults_of(code)
    if faults:
        raise ValueError(f"{path} is not run: it has {first_few(faults)}, which may do more than compute")

    def of_these_types(*arguments: jax.Array) -> list[jax.Array]:
        return [jnp.zeros(value.shape, dtype_of(value.dtype)) for value in record.results]

    def shardings(values: Sequence[ValueRecord]) -> list[NamedSharding]:
        return [NamedSharding(mesh, PartitionSpec(*(value.spec or ()))) for value in values]

    with _refusing(path), jax.enable_x64(True):
        in_shardings, out_shardings = shardings(record.inputs), shardings(record.results)
        operands = jax.device_put(list(arrays), in_shardings)
        template = jax.jit(
            of_these_types, in_shardings=in_shardings, out_shardings=out_shardings, keep_unused=True
        )
        exported = dataclasses.replace(
            export.export(template, platforms=[record.platform])(*operands),
            mlir_module_serialized=code,
        )
        return [np.asarray(result) for result in jax.jit(exported.call)(*operands)]


def faults_of(code: bytes) -> list[str]:
    """Lists the operations of a module that may do more than compute, at any depth.

    XLA finds the function of a custom call by its name. Some functions call Python, or read memory
    at an address that the module names. So no custom call is permitted that ``jax.export`` does not write.
    """
    stable = stable_custom_calls()
    faults: dict[str, None] = {}

    def visit(operation: ir.Operation) -> ir.WalkResult:
        kind = operation.name.partition(".")[2]
        if kind == "custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target not in stable:
                faults[f"a custom call of {target}"] = None
        elif kind in _OF_THE_HOST:
            faults[operation.name] = None
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context(), ir.Location.unknown():
        portable.deserialize_portable_artifact(code).operation.walk(visit)
    return list(faults)


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Raises ``ValueError`` for errors of JAX, which has many kinds for code that it cannot read."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path} cannot run with JAX {jax.__version__}: {text}") from error


def _devices(platform: str, count: int) -> list[jax.Device]:
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        raise DevicesError(
            f"the task runs on {platform}, and JAX has {jax.default_backend()} devices here"
        ) from None
    if len(devices) < count:
        raise DevicesError(
            f"the task runs on {count} devices, and JAX has {len(devices)} here: set "
            f"JAX_NUM_CPU_DEVICES={count} before JAX is imported"
        )
    return devices[:count]
