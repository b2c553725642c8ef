"""The reasons why a group is idle, as text: of simulated gaps, and of measured ones in attributions."""

from __future__ import annotations

NOTHING_LEFT = "nothing left to do"
"""The reason of the idle time after a group's last task."""


def waits_for(task: object, group: int, is_first: bool) -> str:
    """A group waits for a task of another group to end.

    Args:
      is_first: whether the group that waits has done nothing yet.
    """
    return f"waits for {_first(is_first)}{task} of group {group}"


def waits_for_transfer(task: object, group: int, is_first: bool) -> str:
    """A group waits for a message with the result of a task of another group, which has ended."""
    return f"waits for {_first(is_first)}the transfer of {task} from group {group}"


def sends(task: object, group: int) -> str:
    """A group that blocks sends the result of its task to another group."""
    return f"sends {task} to group {group}"


def _first(is_first: bool) -> str:
    return "its first input, " if is_first else ""
