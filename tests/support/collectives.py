"""Reads what crosses the devices of a group from the programs that XLA compiled."""

import collections
import dataclasses
import math
import re

from mpmd.ir import Cell
from mpmd.runtime.operations import RunTask

_OPERATIONS = "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|reduce-scatter"
_COLLECTIVE = re.compile(rf" = (.*?) ({_OPERATIONS})(?:-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective in a compiled program; ``shapes`` are those of its results on one device."""

    operation: str
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


def collectives_in(text):
    """The collectives in the text of a compiled program; one in a loop counts once."""
    found = []
    for results, operation in _COLLECTIVE.findall(text):
        arrays = [
            (tuple(int(size) for size in sizes.split(",") if size), int(bits or 8) // 8)
            for _, bits, sizes in _ARRAY.findall(results)
        ]
        nbytes = sum(math.prod(shape) * width for shape, width in arrays)
        found.append(Collective(operation, tuple(shape for shape, _ in arrays), nbytes))
    return found


def collectives_of(loaded, mesh):
    """The collectives of each executable of a step that groups of this process have loaded.

    Returns: two dicts by the names of executables, of those that run in the loop and of those outside.
    """
    loaded_program, in_loop, outside = loaded._loaded, {}, {}
    for group in loaded_program.plan.programs:
        worker = mesh.runtime._groups[group.mpmd_idx].worker
        operations = worker._programs[loaded_program.number].executor._operations
        tasks = [operation for operation in operations if isinstance(operation, RunTask)]
        for run, task in zip(group.runs, tasks, strict=True):
            found = in_loop if isinstance(run.task, Cell) else outside
            if run.executable not in found:
                found[run.executable] = collectives_in(task.call.as_text())
    return in_loop, outside


def bytes_by_operation(by_executable):
    """The bytes of the collectives' results, of one run of each executable."""
    count = collections.Counter()
    for found in by_executable.values():
        for collective in found:
            count[collective.operation] += collective.nbytes
    return dict(count)
