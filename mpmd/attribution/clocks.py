"""The times of all processes by one clock, with the error of the match.

Processes of a kernel read one monotonic clock. Two clocks are compared by the messages between them: no
message arrives before it was sent. With ``w(a, b)`` the least time that a message from ``a`` to ``b`` seems
to have taken, the clock of ``b`` is ahead of the clock of ``a`` by at most ``w(a, b)``, and by at most the
length ``d(a, b)`` of the shortest path of such bounds: by ``-d(b, a)`` to ``d(a, b)``. The middle is taken,
as NTP does for two clocks (RFC 5905, section 8). The middles of all clocks relative to one clock agree with
all bounds, since ``d`` obeys the triangle inequality: no message arrives before it was sent.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from mpmd.ir.plan import Edge
from mpmd.ir.process_times import ProcessTimes, RecordedStep

Senders = Callable[[Edge, int, int], Collection[int]]
"""The ranks in the sending group from which a rank of the receiving group gets a message of an edge."""


@dataclasses.dataclass(frozen=True)
class MatchedStep:
    """One step by the driver's clock, in nanoseconds since its call.

    A step for which groups were replaced begins when the first group turned to its request again.

    Attributes:
      returned: when the driver had all replies.
      processes: by group and rank.
      errors: for each clock, the nanoseconds by which its times may be wrong.
      recovery: the nanoseconds from the call to the begin, in which groups were replaced and earlier steps
        run again; ``None``: no group was.
    """

    returned: int
    processes: tuple[ProcessTimes, ...]
    errors: Mapping[str, int]
    recovery: int | None = None

    @property
    def error(self) -> int:
        """The largest error of a clock, in nanoseconds."""
        return max(self.errors.values(), default=0)


def match(step: RecordedStep, senders: Senders) -> MatchedStep:
    """Brings a step to the driver's clock. Each step is matched by itself, since clocks drift apart.

    Clocks that drift apart while the step runs can make the bounds contradict one another by nanoseconds;
    then all are loosened by the least amount that ends this, which is added to the errors.
    """
    driver = step.driver.clock
    clocks = [driver, *sorted({times.host.clock for times in step.processes} - {driver})]
    distances, slack = _distances(_bounds(step, clocks, senders))
    ahead = {clock: int(distances[0, i] - distances[i, 0]) // 2 for i, clock in enumerate(clocks)}
    errors = {
        clock: slack + int(distances[0, i] + distances[i, 0] + 1) // 2 if i else 0
        for i, clock in enumerate(clocks)
    }
    processes = [times.shifted(-ahead[times.host.clock] - step.called) for times in step.processes]
    recovery = min((times.received for times in processes), default=0) if step.is_recovered else None
    begin = recovery or 0
    return MatchedStep(
        returned=step.returned - step.called - begin,
        processes=tuple(times.shifted(-begin) for times in processes),
        errors=errors,
        recovery=recovery,
    )


def _bounds(step: RecordedStep, clocks: Sequence[str], senders: Senders) -> np.ndarray:
    """Returns for each pair of clocks the least nanoseconds of a message; infinite without messages."""
    numbers = {clock: i for i, clock in enumerate(clocks)}
    bounds = np.full((len(clocks), len(clocks)), np.inf)
    np.fill_diagonal(bounds, 0)
    for source, sent, target, arrived in _flights(step, senders):
        pair = numbers[source], numbers[target]
        if source != target:
            bounds[pair] = min(bounds[pair], arrived - sent)
    return bounds


def _flights(step: RecordedStep, senders: Senders) -> Iterator[tuple[str, int, str, int]]:
    """Yields the clocks and times of sending and arrival of each request, reply and message."""
    driver = step.driver.clock
    sent: dict[tuple[Edge, int], dict[int, tuple[str, int]]] = collections.defaultdict(dict)
    for times in step.processes:
        yield driver, step.called, times.host.clock, times.received
        yield times.host.clock, times.replied, driver, step.returned
        for send in times.sends:
            sent[(times.mpmd_idx, send.dst), send.tag][times.rank] = times.host.clock, send.start
    for times in step.processes:
        for wait in times.waits:
            edge = wait.src, times.mpmd_idx
            by_rank = sent[edge, wait.tag]
            for rank in senders(edge, wait.tag, times.rank):
                yield *by_rank[rank], times.host.clock, wait.arrived


def _distances(bounds: np.ndarray) -> tuple[np.ndarray, int]:
    """The lengths of the shortest paths, and the slack that all bounds need for there to be any.

    The driver asks every process and has its reply, so all clocks are connected.
    """
    distances = _shortest_paths(bounds)
    if not (np.diag(distances) < 0).any():
        return distances, 0
    least, most = 0, int(-bounds[np.isfinite(bounds)].min()) + 1
    while least < most:
        slack = (least + most) // 2
        if (np.diag(_shortest_paths(_loosened(bounds, slack))) < 0).any():
            least = slack + 1
        else:
            most = slack
    return _shortest_paths(_loosened(bounds, least)), least


def _loosened(bounds: np.ndarray, slack: int) -> np.ndarray:
    loosened = bounds + slack
    np.fill_diagonal(loosened, 0)
    return loosened


def _shortest_paths(bounds: np.ndarray) -> np.ndarray:
    """Returns the lengths of the shortest paths between all pairs (Floyd and Warshall)."""
    distances = bounds.copy()
    for through in range(len(bounds)):
        np.minimum(distances, distances[:, through, None] + distances[None, through, :], out=distances)
    return distances
