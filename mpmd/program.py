"""A compiled step as runtimes receive it: the plan, and the functions of its executables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax import export
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh

from mpmd.compat import export_two_bit_integers, forget_lowered
from mpmd.ir.plan import AnyTask, Executable, Name, Plan, Spec
from mpmd.language.callbacks import HostCallback
from mpmd.sharding import to_sharding, within

Function = Callable[..., Sequence[jax.Array]]
"""Flat arrays in, a sequence of arrays out; traceable by JAX."""


Variant = tuple[str, tuple[Spec, ...]]
"""An executable by its name, with the specs of its inputs where those were open."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A plan with the functions of its executables and the values of its constants.

    Attributes:
      functions: the function of each executable. It knows no device; each group compiles it for its submesh.
      constants: the value of each constant.
      jaxprs: the equations of each ``Run``, by group and task, with inputs and outputs in the plan's order.
        Unlike an executable, which equal tasks share, a jaxpr has the lines of the user's program that it
        comes from. Jaxprs explain the plan; they do not run.
      callbacks: the functions that the driver calls, by the numbers that ``HostCall`` has.
      python_calls: the callbacks that are part of executables, each with the user's line: those whose results
        are read. They run only in the process in which the step was traced.
      compiled: the executables that the groups have compiled already, because their specs were open: the name
        that each had then, and the specs of its inputs.
    """

    plan: Plan
    functions: Mapping[str, Function]
    constants: Mapping[Name, np.ndarray]
    jaxprs: Mapping[tuple[int, AnyTask], Jaxpr] = dataclasses.field(default_factory=dict)
    callbacks: tuple[HostCallback, ...] = ()
    python_calls: tuple[str, ...] = ()
    compiled: Mapping[str, Variant] = dataclasses.field(default_factory=dict)

    def without_functions(self) -> Program:
        """The program without its functions and constants, which groups that have loaded it have.

        While a function lives, JAX keeps its lowered code, which takes a megabyte or more.
        """
        return dataclasses.replace(self, functions={}, constants={})


def arguments(executable: Executable) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in executable.inputs]


def jitted(function: Function, executable: Executable, submesh: jax.sharding.Mesh | AbstractMesh):
    def shardings(specs):
        return tuple(None if spec is None else to_sharding(spec, submesh) for spec in specs)

    return jax.jit(
        function,
        in_shardings=shardings(executable.in_specs),
        out_shardings=shardings(executable.out_specs),
        donate_argnums=executable.donated,
        keep_unused=True,
    )


def check_exportable(program: Program) -> None:
    if program.python_calls:
        calls = "\n  ".join(program.python_calls)
        raise ValueError(
            "these callbacks into Python run only where the step was traced, because the step reads what "
            f"they return, or because they are in a while_loop or a shard_map:\n  {calls}\n"
            "Groups in other processes have the driver call jax.debug.print, jax.debug.callback and "
            "io_callback without a result. Compute the results in JAX, pass them to the step as arguments, "
            "or run in one process with mpmd.MpmdMesh"
        )


def export_function(
    function: Function, executable: Executable, submesh: AbstractMesh, platform: str
) -> bytes:
    export_two_bit_integers()
    return bytes(exported(function, executable, submesh, platform).serialize())


def exported(
    function: Function, executable: Executable, submesh: AbstractMesh, platform: str
) -> export.Exported:
    # Exporting ignores donation, which the group declares when it compiles the function.
    undonated = dataclasses.replace(executable, donated=())
    with within(submesh):
        export_of = export.export(jitted(function, undonated, submesh), platforms=[platform])
        result = export_of(*arguments(executable))
    forget_lowered()
    return result
