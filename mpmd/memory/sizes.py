"""The bytes of a value on each device."""

from __future__ import annotations

from collections.abc import Mapping

from mpmd.ir.plan import Aval, Name, Plan, Spec
from mpmd.ir.routes import held_specs
from mpmd.ir.specs import num_shards


def device_bytes(aval: Aval, spec: Spec | None, sizes: Mapping[str, int]) -> int:
    """The bytes of a value on each device of a submesh; a value whose spec is open counts as replicated.

    Args:
      sizes: the sizes of the submesh's axes.
    """
    return aval.nbytes // num_shards(spec or (), sizes)


def sizes_on_devices(plan: Plan, mpmd_idx: int) -> dict[Name, int]:
    """The bytes, on each device of a group, of each value that the group has at some time."""
    axes, avals = plan.submesh(mpmd_idx), plan.avals()
    specs = held_specs(plan, mpmd_idx, axes)
    return {name: device_bytes(avals[name], spec, axes) for name, spec in specs.items() if name in avals}
