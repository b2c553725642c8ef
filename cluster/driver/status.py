"""The activity of a mesh's processes, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from cluster.protocol.process_info import ProcessInfo
from mpmd.errors import GroupDiedError
from mpmd.util.notebook import ShownAsText
from mpmd.util.tables import table

_MOST_CHARACTERS = 100


@dataclasses.dataclass(frozen=True)
class ProcessStatus:
    """A process at one moment.

    Attributes:
      process: its group and rank, and where it runs.
      state: its activity, with the step and the time that it has taken, or that it is dead, and why.
      pending: the number of the driver's requests that it has not answered.
    """

    process: ProcessInfo
    state: str
    pending: int


@dataclasses.dataclass(frozen=True, repr=False)
class ProcessesStatus(ShownAsText):
    """All processes of a mesh at one moment; prints as a table.

    Attributes:
      processes: the processes of the groups.
      ready_spares: the number of spare processes that could take a place now; ``None`` without
        ``Recovery(spares=...)``, and while groups are being replaced.
    """

    processes: tuple[ProcessStatus, ...]
    ready_spares: int | None = None

    def __str__(self) -> str:
        header = ("group", "process", "node", "pid", "pending", "state")
        rows = []
        for status in self.processes:
            process = status.process
            host = process.shares_with
            node = process.node if host is None else f"{process.node}, shared with group {host}"
            numbers = (process.mpmd_idx, process.rank, node, process.pid, status.pending)
            rows.append((*map(str, numbers), _shortened(status.state)))
        spares = "" if self.ready_spares is None else f"\nready spares: {self.ready_spares}"
        return f"{table(header, rows)}{spares}"


def while_recovering(
    processes: Sequence[ProcessInfo], dead: Mapping[int, GroupDiedError], pending: Mapping[int, int]
) -> ProcessesStatus:
    """The status of all processes while groups are replaced: the reason, or which groups a process waits for.

    Args:
      dead: the groups that are replaced; without any, all groups go back.
      pending: for each group, how many requests it has not answered.
    """
    names = ", ".join(f"group {mpmd_idx}" for mpmd_idx in sorted(dead))
    states = {mpmd_idx: f"being replaced: {error}" for mpmd_idx, error in dead.items()}
    waiting = f"waits until others are replaced: {names}" if dead else "goes back with all groups"
    return ProcessesStatus(
        tuple(
            ProcessStatus(process, states.get(process.mpmd_idx, waiting), pending.get(process.mpmd_idx, 0))
            for process in processes
        )
    )


def _shortened(state: str) -> str:
    line = state.splitlines()[0]
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 1]}…"
