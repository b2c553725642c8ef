"""Requests to groups that recovery leaves out: sent once, and never repeated after a death."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import jax
import numpy as np

from cluster.driver.calls.joined import failed
from cluster.driver.calls.pending_calls import copy_of
from cluster.recovery.events import Died, Sent, Settled, Wanted
from cluster.recovery.requests import Requests
from mpmd.errors import GroupDiedError
from mpmd.runtime.lost_values import LostValueError
from mpmd.runtime.requests import NOTHING_RELEASED, Handle, StepReply, StepRequest
from mpmd.runtime.storage import JsonSpec, StoredArray

_T = TypeVar("_T")


class UnloggedRequests:
    """Sends requests to groups that are left out. Callers hold the requests' lock, except for ``replace``.

    Args:
      requests: the requests that are logged.
      wake: has the groups that are to be replaced looked for soon.
    """

    def __init__(self, requests: Requests, wake: Callable[[], None]):
        self._requests = requests
        self._left_out = requests.membership.left_out
        self._groups = requests.groups
        self._wake = wake
        self._lost: dict[Handle, BaseException] = {}  # deaths, by the results that they ended

    def concerns(self, mpmd_idxs: Collection[int]) -> bool:
        """Whether one of the groups ``mpmd_idxs`` is left out."""
        return not self._left_out.groups.isdisjoint(mpmd_idxs)

    def submit_step(self, requests: Mapping[int, StepRequest]) -> dict[int, Future[StepReply]]:
        """As ``Runtime.submit_step``. Groups that recover only send values in this step.

        They do not send the values again after a death, so nothing that a replay needs may come with the
        step.
        """
        logged = requests.keys() - self._left_out.groups
        if any(requests[mpmd_idx].host_arrays for mpmd_idx in logged):
            refused = ValueError(
                "a step that copies values from groups which recover to groups which Recovery(parts=...) "
                "leaves out takes no arrays of the host on the former: pass MpmdArrays"
            )
            return {mpmd_idx: failed(copy_of(refused)) for mpmd_idx in requests}
        self._requests.unload_unused()
        released = self._requests.take_released(requests.keys() - logged)
        asked = {
            i: dataclasses.replace(request, released=released.get(i, NOTHING_RELEASED))
            for i, request in requests.items()
        }
        replies = self._groups.submit_step(asked)
        return {i: self._noted(self._explained(asked[i], reply)) for i, reply in replies.items()}

    def _explained(self, request: StepRequest, reply: Future[StepReply]) -> Future[StepReply]:
        """A reply whose error, where an input was lost by a death, is that death."""
        explained: Future[StepReply] = Future()

        def settle(reply: Future[StepReply]) -> None:
            error = reply.exception()
            if isinstance(error, LostValueError):
                deaths = [self._lost.get(handle) for handle in request.inputs]  # the user may free them
                error = next((_instead_of(error, death) for death in deaths if death is not None), error)
            if isinstance(error, GroupDiedError):
                self._lost |= dict.fromkeys(request.outputs, copy_of(error))
            if error is None:
                explained.set_result(reply.result())
            else:
                explained.set_exception(error)  # which has what the group has sent until then

        reply.add_done_callback(settle)
        return explained

    def free(self, handle: Handle) -> None:
        """Nobody will read a value. May be called at any point of any thread."""
        self._lost.pop(handle, None)

    def fetch(self, mpmd_idx: int, handle: Handle) -> Future[jax.Array | np.ndarray]:
        """As ``Runtime.fetch``."""
        return self._noted(self._groups.fetch(mpmd_idx, handle))

    def read(self, mpmd_idx: int, stored: Mapping[Handle, StoredArray]) -> Future[StepReply]:
        """As ``Runtime.read``."""
        return self._noted(self._groups.read(mpmd_idx, stored))

    def copy_out(self, mpmd_idx: int, copy: Handle, handles: Sequence[Handle]) -> Future[None]:
        """As ``Runtime.copy_out``."""
        return self._noted(self._groups.copy_out(mpmd_idx, copy, handles))

    def write(
        self, mpmd_idx: int, copy: Handle, specs: Sequence[Sequence[tuple[Handle, JsonSpec]]]
    ) -> Future[list[int]]:
        """As ``Runtime.write``."""
        return self._noted(self._groups.write(mpmd_idx, copy, specs))

    def tell_released(self) -> None:
        """Tells groups now which values to drop; otherwise their next request tells them."""
        for mpmd_idx, released in self._requests.take_released(self._left_out.groups).items():
            if released != NOTHING_RELEASED:
                with contextlib.suppress(RuntimeError):  # the group has died
                    for told in self._groups.call_group(mpmd_idx, "release", released):
                        self._noted(told)

    def _noted(self, future: Future[_T]) -> Future[_T]:
        self._requests.tell(Sent(future))
        future.add_done_callback(lambda future: self._requests.tell(Settled(future)))
        return future

    def replace(self, mpmd_idxs: Collection[int], timeout: float) -> None:
        """Has dead groups of ``mpmd_idxs`` restart without values. Returns when all the groups live.

        Raises: ``RuntimeError`` when they do not within ``timeout`` seconds.
        """
        requests, membership, left_out = self._requests, self._requests.membership, self._left_out
        deadline = time.monotonic() + timeout
        with requests.changed:
            may_begin = requests.changed.wait_for(lambda: membership.error or membership.is_running, timeout)
            for mpmd_idx in range(requests.num_groups):
                # Who was told by a step may be earlier than the membership, also of a group of another part.
                if membership.is_running and (death := self._groups.death_of(mpmd_idx)) is not None:
                    requests.tell(Died(death))
            requests.tell(Wanted(frozenset(left_out.dead.keys() & set(mpmd_idxs))))
            self._wake()
            has_ended = requests.changed.wait_for(
                lambda: membership.error or not (membership.dead or left_out.dead.keys() & set(mpmd_idxs)),
                max(0.0, deadline - time.monotonic()),
            )
            if membership.error is not None:
                raise copy_of(membership.error)
            if late := sorted(left_out.dead.keys() & set(mpmd_idxs)):
                requests.tell(Wanted(frozenset(late), given_up=True))
                said = membership.moves.said
                why = "".join(f"; {said[mpmd_idx]}" for mpmd_idx in late if mpmd_idx in said)
                names = ", ".join(f"group {mpmd_idx}" for mpmd_idx in late)
                raise RuntimeError(f"replace: {names} did not begin anew within {timeout:g} s{why}")
            if not may_begin or not has_ended:
                raise RuntimeError(f"replace: other groups have recovered or moved for {timeout:g} s")


def _instead_of(error: BaseException, death: BaseException) -> BaseException:
    """The death, with what a group has sent along with its error."""
    explained = copy_of(death)
    vars(explained).update(vars(error) | vars(explained))
    return explained
