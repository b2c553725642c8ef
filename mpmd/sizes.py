"""How many devices a mesh can have: what is asked is compared before anything of that size is made."""

from __future__ import annotations

MOST_DEVICES = 2**20
"""The devices of all groups of a mesh; more than any cluster has."""


def fault_of_size(num_devices: int) -> str | None:
    """Why there cannot be so many devices; ``None`` where there can."""
    if num_devices <= MOST_DEVICES:
        return None
    return f"{counted(num_devices)} devices are more than a mesh can have, which are {MOST_DEVICES}"


def counted(number: int) -> str:
    """A number, as short as one that a user has mistyped needs to be."""
    return str(number) if number < 10**18 else "more than 10**18"
