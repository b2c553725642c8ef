"""Where an array is, as data."""

from __future__ import annotations

import dataclasses

from mpmd.ir import Spec


@dataclasses.dataclass(frozen=True)
class Placement:
    """The groups that hold an array, and how it is sharded within each; no groups: not decided."""

    mpmd_idxs: tuple[int, ...] = ()
    spec: Spec | None = None


ANYWHERE = Placement()
