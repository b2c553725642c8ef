"""Plants a wrong gradient of one weight, of one stage and microbatch, in whatever runs in this process."""

import contextlib
import dataclasses
import re

import jax
import numpy as np

from mpmd.ir.plan import Cell
from mpmd.runtime.operations import Operations, RunTask

WRONG = 1.02
"""What the gradient of the microbatch is multiplied with."""


@contextlib.contextmanager
def planted(stage, microbatch, choose=max):
    """Within it, groups of this process add a wrong gradient to one accumulator.

    Args:
      choose: of the accumulators of floats that the stage's backward updates: the largest, or smallest.

    Yields: a list, to which each wrong gradient is added that was more than zero, as its shape.
    """
    original, wrong = Operations._run, []

    def run(self, instruction):
        for operation in original(self, instruction):
            if isinstance(operation, RunTask) and _is_backward(operation.task, stage, microbatch):
                call = _wrong(operation.call, instruction, choose, wrong)
                operation = dataclasses.replace(operation, call=call)
            yield operation

    Operations._run = run
    try:
        yield wrong
    finally:
        Operations._run = original


def _is_backward(task, stage, microbatch):
    return isinstance(task, Cell) and f"bwd_{stage}__{microbatch}" in map(str, task.tasks)


def _wrong(call, instruction, choose, wrong):
    """The call, with one of the accumulators among its outputs as if the gradient was another."""
    outputs = {
        match[1]: position
        for position, name in enumerate(instruction.outputs)
        if (match := re.fullmatch(r"(bwd_\d+\.state\d+)@\d+", name))
    }
    assert outputs, f"{instruction} updates no accumulator"
    inputs = {name.partition("@")[0]: position for position, name in enumerate(instruction.inputs)}

    def called(*args):
        before = {name: np.asarray(args[inputs[name]]) for name in outputs if name in inputs}
        results = list(call(*args))
        floats = [name for name in outputs if np.issubdtype(results[outputs[name]].dtype, np.floating)]
        chosen = choose(floats, key=lambda name: results[outputs[name]].size)
        right = results[outputs[chosen]]
        gradient = np.asarray(right) - before.get(chosen, np.float32(0))
        if np.any(gradient):
            wrong.append(right.shape)
        value = np.asarray(right) + (WRONG - 1) * gradient
        results[outputs[chosen]] = jax.device_put(value.astype(right.dtype), right.sharding)
        return results

    return called
