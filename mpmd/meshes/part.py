"""Parts of a mesh: some of its groups, under a name, for a model of their own.

The compiler sees the groups of a part alone, numbered from 0, and so do reports, simulations and profiles.
Arrays, requests, messages between groups, errors and checkpoints have the numbers of the whole mesh. So a
function of the whole mesh takes arrays of all parts, and runtimes know of parts only that their steps do not
wait for one another.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh

from mpmd.compat import api_boundary
from mpmd.errors import SilentCorruptionError
from mpmd.ir.routes import Topology
from mpmd.meshes.group_mesh import GroupMesh
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.replicas import inconclusive_text, unequal_replicas
from mpmd.runtime.survey import take_digests
from mpmd.util.tables import first_few
from mpmd.util.warn import warn_user
from mpmd.validation import Fault, int_fault, raise_faults, shown, str_fault, type_fault

PARTS = 'a dict of names and numbers of groups, as {"actor": 4, "sampler": 2}'


class WholeMesh(GroupMesh):
    """The base of meshes of groups, which may have parts.

    Args:
      parts: the number of groups of each part by its name, in the order of the groups; without faults.
    """

    def __init__(self, parts: Mapping[str, int] | None):
        self._ranges = ranges_of(parts or {})
        # Parts refer to the mesh, which ends with the last reference to it.
        self._parts: weakref.WeakValueDictionary[str, PartMesh] = weakref.WeakValueDictionary()

    @property
    def parts(self) -> dict[str, range]:
        """The groups of each part, by its name; empty without parts."""
        return dict(self._ranges)

    @api_boundary
    def verify_replicas(self) -> None:
        """Compares the copies of all values that groups hold, after the steps submitted before.

        The devices of a group that hold the same shard of a value have the same bits, and so have groups of
        which one has received the value from the other, such as a tied weight. Digests are compared, so that
        each device reads its values once, and nothing is computed again.

        A ``RuntimeWarning`` says what could not be compared: that copies are inconclusive, since they differ
        and processes with other processors, threads, flags or versions have computed them; and that a group
        is dead which ``Recovery(parts=...)`` leaves out.

        Raises: ``mpmd.errors.SilentCorruptionError`` that lists devices with equal bits together.
        """
        processes = take_digests(self.whole.runtime)
        absent = set(range(self.whole.mpmd_dim)) - {process.mpmd_idx for process in processes}
        if absent:
            names = ", ".join(f"group {mpmd_idx}" for mpmd_idx in sorted(absent))
            text = f"verify_replicas: {names} is left out, which has died; mesh.replace has it begin anew"
            warn_user(text, RuntimeWarning)
        unequal = unequal_replicas(processes)
        if inconclusive := [each for each in unequal if not each.is_conclusive]:
            text = f"verify_replicas: {inconclusive_text(inconclusive)}"
            warn_user(text, RuntimeWarning)
        if wrong := [each for each in unequal if each.is_conclusive]:
            suspects = {mpmd_idx for each in wrong for mpmd_idx in each.mpmd_idxs}
            raise SilentCorruptionError("\n".join(map(str, wrong)), sorted(suspects))

    @api_boundary
    def part(self, name: str) -> PartMesh:
        """Some groups of the mesh, for which steps are compiled as for a mesh.

        Keep the object while you use it: copies to the part are compiled once in the lifetime of the object.

        Args:
          name: the name of the part, as in the mesh's ``parts``.

        Raises: ``ValueError`` for a mesh without such a part.
        """
        raise_faults(str_fault("name", name))
        if name not in self._ranges:
            names = ", ".join(map(repr, self._ranges)) or f"none; the mesh is made with parts={PARTS}"
            raise ValueError(f"name: there is no part {shown(name)} of the mesh; its parts are {names}")
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = PartMesh(self.whole, name, self._ranges[name])
        return part


def parts_faults(parts: Any, num_groups: int | None = None) -> Iterator[Fault | None]:
    """The faults of the parts of a mesh.

    Args:
      num_groups: the number of groups of the mesh, which the parts have to share; ``None``: not known.
    """
    if parts is None:
        return
    if not isinstance(parts, Mapping):
        yield type_fault("parts", parts, Mapping, PARTS)
        return
    faults = [
        fault
        for name, size in parts.items()
        for fault in (str_fault("the name of a part", name), int_fault(f"parts[{name!r}]", size))
        if fault
    ]
    yield from faults
    if not faults and num_groups is not None and sum(parts.values()) != num_groups:
        yield ValueError(
            f"parts has {sum(parts.values())} groups, and the mesh {num_groups}: each group is in one part"
        )


def ranges_of(parts: Mapping[str, int]) -> dict[str, range]:
    ends = itertools.accumulate(parts.values(), initial=0)
    return {name: range(*span) for name, span in zip(parts, itertools.pairwise(ends), strict=True)}


class PartMesh(GroupMesh):
    """Some groups of a mesh: ``mesh.part("sampler")``, for which steps are compiled as for a mesh.

    Steps of different parts run at the same time. A step of a part takes arrays of the part, and of the host;
    ``mpmd.reshard`` copies arrays from part to part.

    Attributes:
      whole: the mesh that it is a part of.
      part_name: its name there.
      mpmd_idxs: the numbers of its groups there, ascending.
    """

    part_name: str

    def __init__(self, whole: GroupMesh, part_name: str, mpmd_idxs: Sequence[int]):
        self._whole = whole
        self.part_name = part_name
        self.mpmd_axis_name = whole.mpmd_axis_name
        self._mpmd_idxs = tuple(mpmd_idxs)

    @property
    def whole(self) -> GroupMesh:
        return self._whole

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        return self._mpmd_idxs

    @property
    def abstract_submeshes(self) -> tuple[AbstractMesh, ...]:
        submeshes = self.whole.abstract_submeshes
        return tuple(submeshes[group] for group in self.mpmd_idxs)

    @functools.cached_property
    def topology(self) -> Topology:
        topology, numbers = self.whole.topology, self.numbers
        gathering = frozenset(
            (numbers[src], numbers[dst])
            for src, dst in topology.gathering
            if src in numbers and dst in numbers
        )
        return Topology(tuple(topology.groups[group] for group in self.mpmd_idxs), gathering)

    @property
    def runtime(self) -> Runtime:
        """The running groups of the whole mesh."""
        return self.whole.runtime

    @property
    def recovery_seconds(self) -> Sequence[float]:
        """The duration of each recovery of the whole mesh so far."""
        return self.whole.recovery_seconds

    def __repr__(self) -> str:
        return f"part {self.part_name!r}, groups {first_few(map(str, self.mpmd_idxs))}, of {self.whole!r}"
