"""Functions of portable code, run by JAX.

The files of ``jax.export`` itself take a package that JAX does not need. So the types of a function are in
the record. Here JAX exports a function of these types, which then gets the code in place of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mpmd.replay.record import ArrayType, Export, Spec
from mpmd.replay.values import dtype_of


class DevicesError(ValueError):
    """JAX has other or fewer devices here than portable code is for."""


def record_of(
    exported: export.Exported,
    file: str,
    function: str,
    inputs: tuple[ArrayType, ...],
    outputs: tuple[ArrayType, ...],
) -> Export:
    """The record of a function in a module that JAX has exported, of which all arguments are kept.

    Args:
      file: that of the module.
      inputs, outputs: the types of the function's arguments and results.
    """
    assert len(exported.module_kept_var_idx) == len(exported.in_avals), "an argument was dropped"
    return Export(
        file=file,
        function=function,
        inputs=inputs,
        outputs=outputs,
        num_devices=exported.nr_devices,
        platforms=tuple(exported.platforms),
        calling_convention=exported.calling_convention_version,
        uses_global_constants=exported.uses_global_constants,
    )


def types_of(avals: Iterable[tuple[ShapedArray, Spec | None]]) -> tuple[ArrayType, ...]:
    """The types of arguments or results, each with its sharding; ``None``: on one device."""
    return tuple(ArrayType(str(aval.dtype), tuple(aval.shape), spec) for aval, spec in avals)


def function_of(
    record: Export, code: bytes, axes: Sequence[tuple[str, int]]
) -> Callable[..., list[np.ndarray]]:
    """The function of portable code, from and to arrays of numpy.

    Args:
      axes: those of the group's devices, each with its size.

    Raises: ``DevicesError`` with the variable that changes that, if one does.
    """
    devices = _devices(record.platforms, record.num_devices)
    mesh = None if record.num_devices == 1 else _mesh(devices, axes)
    in_shardings = [_sharding(each, mesh) for each in record.inputs]
    out_shardings = [_sharding(each, mesh) for each in record.outputs]

    def of_these_types(*arguments: jax.Array) -> list[jax.Array]:
        return [jnp.zeros(each.shape, dtype_of(each.dtype)) for each in record.outputs]

    with jax.enable_x64(True):
        types = [jax.ShapeDtypeStruct(each.shape, dtype_of(each.dtype)) for each in record.inputs]
        jitted = jax.jit(
            of_these_types, in_shardings=in_shardings, out_shardings=out_shardings, keep_unused=True
        )
        template = export.export(jitted, platforms=[record.platforms[0]])(*types)
    exported = dataclasses.replace(
        template,
        platforms=record.platforms,
        mlir_module_serialized=code,
        calling_convention_version=record.calling_convention,
        uses_global_constants=record.uses_global_constants,
    )
    run = jax.jit(exported.call)
    placements = [SingleDeviceSharding(devices[0]) if each is None else each for each in in_shardings]

    def function(*arrays: np.ndarray) -> list[np.ndarray]:
        with jax.enable_x64(True):
            placed = jax.device_put(list(arrays), placements)
            return [np.asarray(result) for result in run(*placed)]

    return function


def _mesh(devices: Sequence[jax.Device], axes: Sequence[tuple[str, int]]) -> Mesh:
    names, sizes = zip(*axes, strict=True)
    return Mesh(np.array(devices).reshape(sizes), names)


def _sharding(array: ArrayType, mesh: Mesh | None) -> Sharding | None:
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(*(array.spec or ())))


def _devices(platforms: Sequence[str], count: int) -> list[jax.Device]:
    """Devices of this process for portable code, of the first of its platforms that are here.

    Raises: ``DevicesError`` when there are none, or too few, with the variable that changes that.
    """
    devices: list[jax.Device] = []
    for platform in platforms:
        try:
            devices = jax.devices(platform)
        except RuntimeError:  # this machine has none
            continue
        if len(devices) >= count:
            return devices[:count]
    if not devices:
        raise DevicesError(
            f"the task runs on {' or '.join(platforms)}, and JAX has {jax.default_backend()} devices here"
        )
    raise DevicesError(
        f"the task runs on {count} devices, and JAX has {len(devices)} here: set "
        f"JAX_NUM_CPU_DEVICES={count} before JAX is imported"
    )
