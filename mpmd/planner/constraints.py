"""The constraints that a caller of ``mpmd.plan`` gives; the planner chooses the rest. No JAX."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from mpmd.language.remat import Remat
from mpmd.planner.layer_profile import Kind
from mpmd.schedules import Schedule
from mpmd.schedules.families import ALL_FAMILIES
from mpmd.validation import (
    Fault,
    bool_fault,
    int_fault,
    int_faults,
    is_int,
    is_sequence,
    raise_faults,
    shown,
)


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

    groups: int | None = None
    num_layers: int | None = None
    num_stages: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    schedule: Schedule | str | None = None
    num_microbatches: int | None = None
    submesh: Mapping[Kind, int] | tuple[Mapping[Kind, int], ...] | None = None
    remat: tuple[Remat, ...] | None = None
    fsdp: bool | None = None
    sequence_parallel: bool | None = None

    @classmethod
    def of(cls, **values: Any) -> Constraints:
        """The constraints with these values, once they are valid; a schedule may be the class of its family.

        Raises: ``TypeError`` or ``ValueError`` with the faults of all values.
        """
        raise_faults(*_faults(values))
        schedule, layers = values.get("schedule"), values.get("layers_per_stage")
        if isinstance(schedule, type):
            values["schedule"] = schedule.__name__
        elif isinstance(schedule, str):
            values["schedule"] = _family(schedule)
        if layers is not None:
            values["layers_per_stage"] = tuple(layers)
        if (remat := values.get("remat")) is not None:
            each = [remat] if isinstance(remat, bool | str) else remat
            values["remat"] = tuple(map(Remat.of, each))
        if isinstance(values.get("submesh"), list):
            values["submesh"] = tuple(values["submesh"])
        return cls(**values)

    @property
    def submeshes(self) -> tuple[Mapping[Kind, int], ...]:
        """The fixed submeshes: one for each group, one for all groups, or none."""
        if self.submesh is None:
            return ()
        return self.submesh if isinstance(self.submesh, tuple) else (self.submesh,)


def _faults(values: Mapping[str, Any]) -> Iterator[Fault | None]:
    for name in ("groups", "num_layers", "num_stages", "num_microbatches"):
        yield int_fault(name, values.get(name), optional=True)
    if (layers := values.get("layers_per_stage")) is not None:
        what = "the numbers of layers of each stage, such as (3, 4, 4)"
        if not is_sequence(layers) or not layers:
            yield TypeError(f"layers_per_stage must be {what}, not {shown(layers)}")
        else:
            yield from int_faults("layers_per_stage", layers)
    yield _schedule_fault(values.get("schedule"))
    submesh, kinds = values.get("submesh"), get_args(Kind)
    each = submesh if isinstance(submesh, list | tuple) else [{} if submesh is None else submesh]
    if not each or not all(map(_is_submesh, each)):
        yield ValueError(
            f"submesh must have the devices of each group along the axes {', '.join(kinds)}, such as "
            "{'data': 2, 'model': 4}, or be a list with one of these for each group; not "
            f"{shown(submesh)}"
        )
    yield _remat_fault(values.get("remat"))
    for name in ("fsdp", "sequence_parallel"):
        yield bool_fault(name, values.get(name), optional=True)


def _remat_fault(remat: Any) -> Fault | None:
    each = remat if is_sequence(remat) else [remat]
    if remat is None:
        return None
    if each and all(isinstance(one, bool | str) for one in each):
        try:
            list(map(Remat.of, each))
        except ValueError as fault:
            return fault
        return None
    names = ", ".join(Remat)
    return TypeError(
        f"remat must be True, False, one of {names}, or one of these for each stage, not {shown(remat)}"
    )


def _is_submesh(submesh: Any) -> bool:
    return isinstance(submesh, Mapping) and all(
        axis in get_args(Kind) and is_int(number) and number >= 1 for axis, number in submesh.items()
    )


def _schedule_fault(schedule: Any) -> Fault | None:
    if schedule is None or isinstance(schedule, Schedule):
        return None
    name = schedule.__name__ if isinstance(schedule, type) else schedule
    if isinstance(name, str) and _family(name) is not None:
        return None
    near = _like(name) if isinstance(name, str) else []
    return ValueError(
        f"schedule must be a schedule, such as mpmd.Std1F1B(4), or one of the families "
        f"{', '.join(ALL_FAMILIES)}, by name or class; not {shown(schedule)}"
        + (f": did you mean {' or '.join(near)}?" if near else "")
    )


def _like(name: str) -> list[str]:
    """The families with the name, or with a similar name."""
    lower = {family.lower(): family for family in ALL_FAMILIES}
    parts = [family for family in lower if name and name.lower() in family]
    return [lower[family] for family in parts or difflib.get_close_matches(name.lower(), lower)]


def _family(name: str) -> str | None:
    """The name of a family as ``ALL_FAMILIES`` spells it, for a name in upper or lower case."""
    return next((family for family in ALL_FAMILIES if family.lower() == name.lower()), None)
