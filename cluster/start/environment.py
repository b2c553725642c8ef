"""The environment variables of a group's process. JAX reads them when it is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COLLECTIVE_TIMEOUT = "--xla_cpu_collective_timeout_seconds"
COLLECTIVE_SECONDS = 60
"""The most seconds that a process waits for its group in a collective operation on CPU devices."""

_CONCURRENCY = "--xla_cpu_enable_concurrency_optimized_scheduler"
"""By default XLA orders a program for many threads, and passes work to a pool even if it has one thread."""

VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}

MEMORY_OF_A_GPU = 0.75
"""The part of a GPU's memory that a process of JAX takes by default.

The rest is for what JAX does not allocate, such as the context of each process."""

PREALLOCATE, MEMORY_FRACTION = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_FRACTIONS = (MEMORY_FRACTION, "XLA_CLIENT_MEM_FRACTION")
"""JAX has two names for one variable, and refuses both together."""

SHAREABLE_PLATFORMS = ("cpu", *VISIBLE_DEVICES)
"""The platforms on which several processes can use a device. A TPU belongs to one."""


def actor_environment(
    variables: Mapping[str, str],
    xla_flags: str,
    platform: str,
    num_devices: int,
    num_threads: int,
    num_processes: int = 1,
) -> dict[str, str]:
    """Adds to the user's variables the variables that give a process of a group its devices.

    Args:
      variables: the user's variables for the process; they take precedence, except for the platform and the
        number of devices.
      xla_flags: the driver's ``XLA_FLAGS``, used when ``variables`` has none.
      platform: the value of ``JAX_PLATFORMS``.
      num_devices: the devices of the process; on CPU they are slices of the host.
      num_threads: its share of the host's cores, the size of XLA's thread pool.
      num_processes: the number of processes of its group.
    """
    environment = {"NPROC": str(num_threads), **variables, "JAX_PLATFORMS": platform}
    if platform == "cpu":
        # JAX heeds this variable rather than the count in XLA_FLAGS, and a process inherits the driver's.
        environment["JAX_NUM_CPU_DEVICES"] = str(num_devices)
        flags = variables.get("XLA_FLAGS", xla_flags).split()
        if num_threads == 1 and not any(flag.startswith(_CONCURRENCY) for flag in flags):
            flags.append(f"{_CONCURRENCY}=false")
        if num_processes > 1 and not any(flag.startswith(_COLLECTIVE_TIMEOUT) for flag in flags):
            flags.append(f"{_COLLECTIVE_TIMEOUT}={COLLECTIVE_SECONDS}")
        environment["XLA_FLAGS"] = " ".join(flags)
    return environment


def gpu_memory(variables: Mapping[str, str], gpus: float | None, shares: bool) -> dict[str, str]:
    """The variables that limit a process's share of a GPU's memory, without variables that the user has set.

    Args:
      variables: the user's variables for the process.
      gpus: the number of GPUs reserved for the process. With a fraction it takes this fraction of the memory
        that JAX takes of a GPU, so that the processes that share it fit into it.
      shares: whether other processes may come to its GPU later. Then it takes memory when it needs some.
    """
    memory = {}
    if shares:
        memory[PREALLOCATE] = "false"
    if gpus and gpus < 1 and not any(name in variables for name in _FRACTIONS):
        memory[MEMORY_FRACTION] = f"{MEMORY_OF_A_GPU * gpus:.4g}"
    return {name: value for name, value in memory.items() if name not in variables}


_DRIVERS = (
    "jax_check_tracer_leaks",
    "jax_debug_infs",
    "jax_debug_key_reuse",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_checks",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)
"""JAX's settings that steps have from the driver, which traces them and calls them."""

_TRUE = ("y", "yes", "t", "true", "on", "1")


def without_effect(variables: Mapping[str, str], config: Any) -> list[str]:
    """For each variable that sets up JAX unlike the driver, a text that it has no effect, and what to do.

    Args:
      variables: the user's variables for the processes.
      config: the driver's ``jax.config``.
    """
    settings = {name.upper(): getattr(config, name) for name in _DRIVERS}
    return [
        f"{name}={variables[name]} in runtime_env has no effect: steps have this setting from the driver, "
        f"where it is {value!r} now. Set it there, in its environment or by "
        f"jax.config.update('{name.lower()}', ...)"
        for name, value in settings.items()
        if name in variables and not _says(variables[name], value)
    ]


def _says(text: str, value: Any) -> bool:
    if isinstance(value, bool):
        return (text.lower() in _TRUE) == value
    return text.lower() == str(getattr(value, "value", value)).lower()


def visible_devices(platform: str, accelerators: tuple[str, ...]) -> dict[str, str]:
    """The environment variables with which a process uses the devices that Ray has given another one."""
    if not accelerators or platform not in VISIBLE_DEVICES:
        return {}
    return {VISIBLE_DEVICES[platform]: ",".join(accelerators), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
