"""What the caller of a plan has decided; the rest is chosen around it. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from mpmd.planner.profile import Kind
from mpmd.schedules import Schedule
from mpmd.schedules.families import FAMILIES


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What a candidate has to have; ``None`` is open.

    Attributes:
      groups: the number of groups.
      num_layers: of a step that leaves its stages open.
      num_stages: of the schedule, of all groups.
      layers_per_stage: the layers of each stage, in order.
      schedule: a schedule, or the name of a family of ``mpmd.schedules.families.FAMILIES``, of any size.
      num_microbatches: of a step.
      submesh: the devices of each group along each axis, the same for all groups or one for each; 1 along an
        axis that is left out.
      remat: whether layers are computed again in the backward.
      fsdp: whether weights are divided over ``data``.
    """

    groups: int | None = None
    num_layers: int | None = None
    num_stages: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    schedule: Schedule | str | None = None
    num_microbatches: int | None = None
    submesh: Mapping[Kind, int] | tuple[Mapping[Kind, int], ...] | None = None
    remat: bool | None = None
    fsdp: bool | None = None

    @classmethod
    def of(cls, **given: Any) -> Fixed:
        """What a caller gives, checked one by one; a schedule may also be the class of its family.

        Raises: ``ValueError`` with what is wrong with each.
        """
        if faults := [*_faults(given)]:
            raise ValueError("\n".join(faults))
        schedule, layers = given.get("schedule"), given.get("layers_per_stage")
        if isinstance(schedule, type):
            given["schedule"] = schedule.__name__
        elif isinstance(schedule, str):
            given["schedule"] = _family(schedule)
        if layers is not None:
            given["layers_per_stage"] = tuple(layers)
        if isinstance(given.get("submesh"), list):
            given["submesh"] = tuple(given["submesh"])
        return cls(**given)

    @property
    def submeshes(self) -> tuple[Mapping[Kind, int], ...]:
        """The submeshes that are fixed: one for each group, one for all of them, or none."""
        if self.submesh is None:
            return ()
        return self.submesh if isinstance(self.submesh, tuple) else (self.submesh,)


def _faults(given: Mapping[str, Any]) -> Iterator[str]:
    for name in ("groups", "num_layers", "num_stages", "num_microbatches"):
        if (value := given.get(name)) is not None and not _is_count(value):
            yield f"{name} must be a whole number of at least 1, got {value!r}"
    layers = given.get("layers_per_stage")
    if layers is not None and not _are_counts(layers):
        yield (
            "layers_per_stage must have the number of layers of each stage, such as (3, 4, 4), got "
            f"{layers!r}"
        )
    yield from _schedule_faults(given.get("schedule"))
    submesh, kinds = given.get("submesh"), get_args(Kind)
    each = submesh if isinstance(submesh, list | tuple) else [{} if submesh is None else submesh]
    if not each or not all(map(_is_submesh, each)):
        yield (
            f"submesh must have the devices of each group along the axes {', '.join(kinds)}, such as "
            "{'data': 2, 'model': 4}, or be a list with one of these for each group; got "
            f"{submesh!r}"
        )
    for name in ("remat", "fsdp"):
        if (value := given.get(name)) is not None and not isinstance(value, bool):
            yield f"{name} must be True, False, or None, which leaves it open; got {value!r}"


def _is_submesh(submesh: Any) -> bool:
    return isinstance(submesh, Mapping) and all(
        axis in get_args(Kind) and _is_count(number) for axis, number in submesh.items()
    )


def _schedule_faults(schedule: Any) -> Iterator[str]:
    if schedule is None or isinstance(schedule, Schedule):
        return
    name = schedule.__name__ if isinstance(schedule, type) else schedule
    if not isinstance(name, str) or _family(name) is None:
        yield (
            f"schedule must be a schedule, such as mpmd.Std1F1B(4), or one of the families "
            f"{', '.join(FAMILIES)}, by name or class; got {schedule!r}"
        )


def _family(name: str) -> str | None:
    """The name of a family as it is written, of one in upper or lower case."""
    return next((family for family in FAMILIES if family.lower() == name.lower()), None)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list | tuple) and bool(values) and all(map(_is_count, values))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
