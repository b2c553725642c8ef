"""The constraints that a caller of ``mpmd.plan`` gives; the planner chooses the rest. No JAX."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_args

from mpmd.language.remat import Remat
from mpmd.planner.layer_profile import Kind
from mpmd.schedules import Schedule
from mpmd.schedules.families import ALL_FAMILIES
from mpmd.validation import (
    Fault,
    bool_fault,
    faults_of,
    int_fault,
    int_faults,
    is_int,
    is_sequence,
    raise_faults,
    shown,
)


def _layers_faults(name: str, layers: Any) -> Iterable[Fault | None]:
    if not is_sequence(layers) or not layers:
        what = "the numbers of layers of each stage, such as (3, 4, 4)"
        return [TypeError(f"{name} must be {what}, not {shown(layers)}")]
    return int_faults(name, layers)


def _schedule_fault(name: str, schedule: Any) -> Fault | None:
    if isinstance(schedule, Schedule) or _family(schedule) is not None:
        return None
    near = _like(schedule) if isinstance(schedule, str) else []
    return ValueError(
        f"{name} must be a schedule, such as mpmd.Std1F1B(4), or one of the families "
        f"{', '.join(ALL_FAMILIES)}, by name or class; not {shown(schedule)}"
        + (f": did you mean {' or '.join(near)}?" if near else "")
    )


def _like(name: str) -> list[str]:
    lower = {family.lower(): family for family in ALL_FAMILIES}
    parts = [family for family in lower if name and name.lower() in family]
    return [lower[family] for family in parts or difflib.get_close_matches(name.lower(), lower)]


def _family(schedule: Any) -> str | None:
    name = schedule.__name__ if isinstance(schedule, type) else schedule
    lower = {family.lower(): family for family in ALL_FAMILIES}
    return lower.get(name.lower()) if isinstance(name, str) else None


def _submesh_fault(name: str, submesh: Any) -> Fault | None:
    each = submesh if isinstance(submesh, list | tuple) else [submesh]
    if each and all(map(_is_submesh, each)):
        return None
    return ValueError(
        f"{name} must have the devices of each group along the axes {', '.join(get_args(Kind))}, such as "
        "{'data': 2, 'model': 4}, or be a list with one of these for each group; not "
        f"{shown(submesh)}"
    )


def _is_submesh(submesh: Any) -> bool:
    return isinstance(submesh, Mapping) and all(
        axis in get_args(Kind) and is_int(number) and number >= 1 for axis, number in submesh.items()
    )


def _remat_fault(name: str, remat: Any) -> Fault | None:
    each = remat if is_sequence(remat) else [remat]
    if each and all(isinstance(one, bool | str) for one in each):
        try:
            list(map(Remat.of, each))
        except ValueError as fault:
            return fault
        return None
    names = ", ".join(Remat)
    return TypeError(
        f"{name} must be True, False, one of {names}, or one of these for each stage, not {shown(remat)}"
    )


_Number = Annotated[int | None, functools.partial(int_fault, optional=True)]
_Flag = Annotated[bool | None, functools.partial(bool_fault, optional=True)]


@dataclasses.dataclass(frozen=True)
class Constraints:
    """Constraints on candidates; ``None`` is open.

    Attributes:
      groups: the number of groups.
      num_layers: the number of layers of a step that leaves its stages open.
      num_stages: the number of stages of all groups.
      layers_per_stage: the number of layers of each stage, in order.
      schedule: a schedule, or the name of a family of
        ``mpmd.schedules.families.ALL_FAMILIES``, of any size.
      num_microbatches: the number of microbatches of a step.
      submesh: the number of devices of a group along each axis, for all groups or one for each; 1 along an
        axis that is left out.
      remat: the policies by which layers are computed again in the backward: one for all stages, or one for
        each; ``Constraints.of`` takes names, ``True`` and ``False``, too, as ``mpmd.plan`` does.
      fsdp: whether weights are divided over ``data``.
      sequence_parallel: whether values between tensor-parallel regions are divided over ``model``.
    """

    groups: _Number = None
    num_layers: _Number = None
    num_stages: _Number = None
    layers_per_stage: Annotated[tuple[int, ...] | None, _layers_faults] = None
    schedule: Annotated[Schedule | str | None, _schedule_fault] = None
    num_microbatches: _Number = None
    submesh: Annotated[Mapping[Kind, int] | tuple[Mapping[Kind, int], ...] | None, _submesh_fault] = None
    remat: Annotated[tuple[Remat, ...] | None, _remat_fault] = None
    fsdp: _Flag = None
    sequence_parallel: _Flag = None

    @classmethod
    def of(cls, **values: Any) -> Constraints:
        """The constraints with these values, once they are valid; a schedule may be the class of its family.

        Raises: ``TypeError`` or ``ValueError`` with the faults of all values.
        """
        given = {name: value for name, value in values.items() if value is not None}
        raise_faults(*faults_of(cls, given))
        if (schedule := given.get("schedule")) is not None and not isinstance(schedule, Schedule):
            given["schedule"] = _family(schedule)
        if isinstance(given.get("remat"), bool | str):
            given["remat"] = [given["remat"]]
        if "remat" in given:
            given["remat"] = map(Remat.of, given["remat"])
        for name in {"layers_per_stage", "remat", "submesh"} & given.keys():
            if not isinstance(given[name], Mapping):
                given[name] = tuple(given[name])
        return cls(**given)

    @property
    def submeshes(self) -> tuple[Mapping[Kind, int], ...]:
        if self.submesh is None:
            return ()
        return self.submesh if isinstance(self.submesh, tuple) else (self.submesh,)
