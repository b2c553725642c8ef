"""The memory that each device of a group needs in a step: a ``Plan`` enters; a ``GroupMemory`` leaves.

Values count under their shardings, with XLA's temporary buffers once the groups have compiled, and with the
messages that transports hold. Start reading in ``group.py``, which follows one group's program. ``sizes.py``
says how much of a value a device holds, ``messages.py`` when messages are in memory, and ``kinds.py`` what
a value is for.
"""

from mpmd.memory.group import GroupMemory, MemoryParts, group_memories
from mpmd.memory.messages import EarliestArrival, Holding
from mpmd.memory.sizes import device_bytes, sizes_on_devices

__all__ = [
    "EarliestArrival",
    "GroupMemory",
    "Holding",
    "MemoryParts",
    "device_bytes",
    "group_memories",
    "sizes_on_devices",
]
