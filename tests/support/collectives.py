"""What crosses the devices of a group in the programs that XLA compiled, in the loop and outside."""

import collections

from mpmd.ir.plan import Cell


def collectives_of(loaded, mesh):
    """The collectives of each executable of a step that groups of this process have loaded.

    Returns: two dicts by the names of executables, of those that run in the loop and of those outside.
    """
    compiled = loaded.collectives()
    in_loop, outside = {}, {}
    for group in loaded.plan.programs:
        for run in group.runs:
            found = in_loop if isinstance(run.task, Cell) else outside
            found[run.executable] = compiled[run.executable]
    return in_loop, outside


def count(found):
    """How many values of each shape each operation is done to; XLA combines some collectives into one."""
    return collections.Counter(
        (collective.operation, shape) for collective in found for shape in collective.shapes
    )


def bytes_by_operation(by_executable):
    """The bytes of the collectives' results, of one run of each executable."""
    count = collections.Counter()
    for found in by_executable.values():
        for collective in found:
            count[collective.operation] += collective.nbytes
    return dict(count)
