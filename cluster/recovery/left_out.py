"""The groups that recovery leaves out: the groups of parts in ``Recovery(parts={"sampler": None})``.

Their requests are not logged and their values are not copied. They do not go back: when another group dies,
their steps under way end first. When such a group dies, the rest of the mesh goes on, and the group stays
dead until the user has it replaced. Nothing here knows Ray, a thread or the clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from cluster.driver.calls.pending_calls import copy_of
from cluster.recovery.report import REPLACED
from mpmd.errors import GroupDiedError
from mpmd.ir.participants import participants
from mpmd.ir.plan import Plan, Send
from mpmd.runtime.lost_values import LostValueError
from mpmd.runtime.requests import Handle, Request, StepRequest
from mpmd.util.tables import first_few


@dataclasses.dataclass
class LeftOut:
    """The groups that recovery leaves out.

    Attributes:
      groups: their numbers.
      dead: the error of each group that has died and is not replaced yet.
      wanted: the dead groups that the user wants replaced.
      lost: errors, by the results of steps that they ended. The user may free a result at any time.
    """

    groups: frozenset[int]
    dead: dict[int, GroupDiedError] = dataclasses.field(default_factory=dict)
    wanted: set[int] = dataclasses.field(default_factory=set)
    lost: dict[Handle, BaseException] = dataclasses.field(default_factory=dict)

    def explain(self, request: Request, error: BaseException | None) -> BaseException | None:
        """The error to tell the user when a request that is not logged has failed with ``error``.

        Where a step has lost its input by a death, the error is that death, with what the group has sent.
        """
        if isinstance(request, StepRequest):
            if isinstance(error, LostValueError):
                deaths = [self.lost.get(handle) for handle in request.inputs]
                error = next((_instead_of(error, death) for death in deaths if death is not None), error)
            if isinstance(error, GroupDiedError):
                self.lost |= dict.fromkeys(request.outputs, copy_of(error))
        return error

    def moves(self, kinds: Mapping[int, str]) -> dict[int, str]:
        living = {mpmd_idx: kind for mpmd_idx, kind in kinds.items() if mpmd_idx not in self.dead}
        return living | dict.fromkeys(sorted(self.wanted & self.dead.keys()), REPLACED)

    def fault_of(self, moving: Collection[int]) -> str | None:
        if not (dead := sorted(self.dead.keys() & set(moving))):
            return None
        return (
            f"{_named(dead)} cannot move, because a process has died, and Recovery(parts=...) leaves the "
            "part out: call mesh.replace for the part, and then resize again"
        )

    def begin_anew(self, replaced: Collection[int]) -> dict[int, RuntimeError]:
        """All groups live again. Returns the error of who asks for old values of each restarted group."""
        self.dead.clear()
        self.wanted.clear()
        return {mpmd_idx: _loss_of_values(mpmd_idx) for mpmd_idx in self.groups.intersection(replaced)}


def _instead_of(error: BaseException, death: BaseException) -> BaseException:
    """The death, with what a group has sent along with its error."""
    explained = copy_of(death)
    vars(explained).update(vars(error) | vars(explained))
    return explained


def host_arrays_fault(requests: Mapping[int, Request], groups: Collection[int]) -> ValueError | None:
    """The fault of a step that sends host arrays to groups which recover, and copies to ``groups``.

    The former do not send the values again after a death, so nothing that a replay needs may come with the
    step.

    Args:
      groups: the groups that are left out.
    """
    steps = {i: request for i, request in requests.items() if isinstance(request, StepRequest)}
    if groups and any(request.host_arrays for i, request in steps.items() if i not in groups):
        return ValueError(
            "a step that copies values from groups which recover to groups which Recovery(parts=...) "
            "leaves out takes no arrays of the host on the former: pass MpmdArrays"
        )
    return None


def _loss_of_values(mpmd_idx: int) -> GroupDiedError:
    return GroupDiedError(
        f"group {mpmd_idx} was replaced, and the values that it had are lost: Recovery(parts=...) leaves its "
        "part out. Copy them to the part again, as by mpmd.reshard",
        mpmd_idx,
    )


def crossing_fault(plan: Plan, groups: Collection[int]) -> ValueError | None:
    """The fault of a program that runs on groups which are left out and on groups which recover.

    ``None`` if the groups that recover only send values.

    Args:
      groups: the groups that are left out.
    """
    logged = set(participants(plan)).difference(groups)
    if len(logged) == len(participants(plan)):
        return None
    results = [str(leaf.path) for leaf in plan.outputs if logged.intersection(leaf.mpmd_idxs)]
    senders = sorted(
        program.mpmd_idx
        for program in plan.programs
        if program.mpmd_idx in groups
        for instruction in program.instructions
        if isinstance(instruction, Send) and instruction.dst in logged
    )
    donated = [leaf.path for leaf in plan.inputs if leaf.donated and logged.intersection(leaf.mpmd_idxs)]
    if not results and not senders and not donated:
        return None
    unlogged = set(participants(plan)) - logged
    return ValueError(
        f"the step runs on {_named(logged)}, which recover, and on {_named(unlogged)}, of a part that "
        "Recovery(parts=...) leaves out: the former could not run it again after a death. "
        "Copy all arguments to one of the parts before, by mpmd.reshard"
    )


def _named(mpmd_idxs: Collection[int]) -> str:
    return f"group{'s' if len(mpmd_idxs) > 1 else ''} {first_few(map(str, sorted(mpmd_idxs)))}"
