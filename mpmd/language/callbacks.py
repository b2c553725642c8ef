"""Callbacks into Python whose results nothing reads: the driver makes the calls.

These are ``jax.debug.print``, ``jax.debug.callback``, and ``io_callback`` whose result nothing reads. The
compiler makes each an equation of ``callback_p``, which holds a ``HostCallback``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Primitive

from mpmd.keys import decode

GIVING_NOTHING_BACK = frozenset({"debug_callback", "debug_print", "io_callback"})
"""JAX's primitives of callbacks whose result may be unread."""

PYTHON_CALLS = GIVING_NOTHING_BACK | {"pure_callback"}

callback_p = Primitive("host_callback")
"""Takes the operands of the ``HostCallback`` in its parameter ``callback``; has no result."""
callback_p.multiple_results = True


class Iterations(NamedTuple):
    """A scan around a callback: its iterations, and whether the last one runs first."""

    length: int
    reverse: bool


@dataclasses.dataclass(frozen=True, eq=False)
class HostCallback:
    """A function of the user's that the driver calls, and the position of the call in the traced step.

    Attributes:
      primitive, params: JAX's equation of the call.
      where: the user's line.
      position: the number of the equation in the step; within a loop, scan or conditional the number of that
        equation, then the number within it. ``None`` after a loop or scan stands for the iteration's number.
      scans: the scans around the call, without the microbatch loop. They stack the operands.
      conditional: whether the first operand, a bool, says if the function is called.
      avals: of the operands of one call.
      literals: the constant operands, by their positions; tasks send the other operands.
    """

    primitive: Primitive
    params: Mapping[str, Any]
    where: str
    position: tuple[int | None, ...]
    scans: tuple[Iterations, ...]
    conditional: bool
    avals: tuple[Any, ...]
    literals: Mapping[int, np.ndarray]

    def __str__(self) -> str:
        return f"{self.primitive} at {self.where}"

    def calls(
        self, microbatch: int | None, values: Sequence[np.ndarray]
    ) -> Iterator[tuple[tuple[int, ...], list[np.ndarray]]]:
        """The calls that a task asks for, each with its position in the order of the step.

        Args:
          microbatch: the microbatch of the task; ``None`` outside the loop.
          values: the operands that it sent, as the plan has them, stacked by the scans.
        """
        for index in np.ndindex(*(scan.length for scan in self.scans)):
            sent = [np.asarray(value[index]) for value in values]
            if self.conditional and not sent.pop(0):
                continue
            remaining = iter(sent)
            operands = [
                self.literals[i] if i in self.literals else next(remaining) for i in range(len(self.avals))
            ]
            times = [
                scan.length - 1 - i if scan.reverse else i for i, scan in zip(index, self.scans, strict=True)
            ]
            iterations = iter(times if microbatch is None else [microbatch, *times])
            yield tuple(next(iterations) if i is None else i for i in self.position), operands

    def call(self, operands: Sequence[np.ndarray], mark: str) -> None:
        """Calls the function as ``jax.jit`` does, with arrays on the CPU. Raises the function's errors.

        Args:
          mark: the text in front of a line of ``jax.debug.print``.
        """
        cpu = jax.local_devices(backend="cpu")[0]
        arrays = [
            decode(jax.device_put(operand, cpu), aval)
            for operand, aval in zip(operands, self.avals, strict=True)
        ]
        with jax.default_device(cpu):
            if "fmt" in self.params:
                self.primitive.bind(*arrays, **{**self.params, "fmt": mark + self.params["fmt"]})
            else:
                self.params["callback"](*arrays)


def callback_of(eqn: JaxprEqn) -> HostCallback | None:
    return eqn.params["callback"] if eqn.primitive is callback_p else None
