"""The answers of groups to requests, which say what steps a group has run."""

from concurrent.futures import Future

import numpy as np

from cluster.driver.calls.joined import failed
from cluster.recovery.store import Snapshot
from mpmd.errors import GroupDiedError, NonFiniteError, StepAborted, StepTimeoutError, TaskError
from mpmd.runtime.digests import DigestedMessage, ProcessDigests, ShardDigest, ValueDigest
from mpmd.runtime.lost_values import LostValueError
from mpmd.runtime.requests import CopyOut, Fetch, Read, StepReply, StepRequest, Write

MANY = 10**4
STATE, DONATED = 10**6, 10**6 + 1
"""The handles of the values that steps make, and of the values that are donated to steps."""


def carry_out(world, mpmd_idx, request, is_repeated=False):
    """The result of a request, and its error."""
    group = world.groups[mpmd_idx]
    match request:
        case Snapshot(number):
            world.copies.setdefault(number, {})[mpmd_idx] = group.chain
        case Fetch():
            return group.chain, None
        case Read() if world.unreadable:
            return None, RuntimeError("no such file")
        case Read():
            return StepReply({}), None
        case CopyOut(copy):
            group.copied.add(copy)
        case Write(copy):
            world.claim(copy in group.copied, "what is written was not copied before")
            return [16], None
        case StepRequest():
            return carry_out_step(world, mpmd_idx, request, is_repeated)
    return None, None


def carry_out_step(world, mpmd_idx, request, is_repeated):
    group, step = world.groups[mpmd_idx], request.step
    is_logged = step in world.chain or step in world.fails
    if request.failed is not None:
        return None, LostValueError(request.failed)
    if step in world.fails:
        return None, StepAborted("a fault") if mpmd_idx else TaskError("a fault", 0, "fwd_0__0")
    if is_repeated and step in world.late:
        return None, StepTimeoutError("step 9 has taken longer than step_timeout=5 s")
    if request.refused and step in world.refusing:
        return None, NonFiniteError("a nan", mpmd_idx, "fwd_0__0")
    if not is_logged and mpmd_idx in world.logged:
        return StepReply({}), None  # it only sends values
    world.claim(step not in group.chain, "a step has run twice")
    is_wrong = world.flips[mpmd_idx] > 0
    world.flips[mpmd_idx] -= is_wrong
    group.chain = (*group.chain, step + is_wrong * next(world.numbers) / MANY)
    if not is_logged:
        world.known[mpmd_idx] = group.chain
        return StepReply({}), None
    value = np.array(hash(group.chain))
    return StepReply({step: value}, messages=messages_of(world, mpmd_idx)), None


def repeat(world, mpmd_idx, request):
    """The answer of a group to a request that is repeated, which is there at once."""
    if not world.groups[mpmd_idx].is_alive:
        return failed(GroupDiedError(f"group {mpmd_idx} died", mpmd_idx))
    result, error = carry_out(world, mpmd_idx, request, is_repeated=True)
    return failed(error) if error is not None else done(result)


def messages_of(world, mpmd_idx):
    others = (mpmd_idx - 1) % len(world.groups), (mpmd_idx + 1) % len(world.groups)
    digests = mpmd_idx in world.garbled, hash(world.groups[mpmd_idx].chain)
    messages = tuple(
        DigestedMessage(is_received, 0, other, {"cpu:0": digest})
        for is_received, other, digest in zip((True, False), others, digests, strict=True)
    )
    return {0: messages}


def digests_of(world, mpmd_idx):
    shards = (ShardDigest("cpu:0", (), hash(world.groups[mpmd_idx].chain)),)
    values = {STATE: ValueDigest("float32[]", shards, False)}
    return done((ProcessDigests(mpmd_idx, 0, f"process {mpmd_idx}", ("cpu",), values),))


def done(result):
    future = Future()
    future.set_result(result)
    return future
