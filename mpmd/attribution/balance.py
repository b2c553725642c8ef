"""The balance of work among groups: one measure for operations, when a step is compiled, and for times."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Balance:
    """The work of the groups that have some.

    Attributes:
      loads: by group, in any unit. Groups without stages are left out: nothing could be moved from them.
    """

    loads: Mapping[int, float]

    @property
    def even_share(self) -> float:
        return 1 / len(self.loads) if self.loads else 1.0

    @property
    def heaviest(self) -> int:
        return max(self.loads, key=self.loads.__getitem__)

    def share(self, group: int) -> float:
        total = sum(self.loads.values())
        return self.loads[group] / total if total else self.even_share

    def factor(self, group: int) -> float:
        return self.share(group) / self.even_share
