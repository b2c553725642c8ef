"""The states of membership, and the consequences of events that come in its last state."""

from __future__ import annotations

import enum

from cluster.recovery import actions as do
from cluster.recovery import events as on
from cluster.recovery.actions import Actions


class State(enum.Enum):
    """The state of all groups together.

    ``RUNNING``: groups are asked for what the user wants. ``QUIESCING``: new requests wait until groups have
    answered all others, which is where a rewind, a move, and going back for a failed step begin.
    ``RECOVERING``: groups are replaced or go back. ``ENDED``: nothing works any more.
    """

    RUNNING, QUIESCING, RECOVERING, ENDED = "running", "quiescing", "recovering", "ended"


def clean_up(event: on.Event) -> Actions:
    """The run has ended: releases processes and connections that a job has started since."""
    match event:
        case on.Done(do.Recover(), result):
            return [do.Disconnect(result.connections), do.Release()]
        case on.Done(job) | on.Faulted(job):
            is_starting = isinstance(job, do.Recover | do.StartSpares | do.Look | do.Prepare)
            return [do.Release()] if is_starting else []
    return []
