"""Schedules: the order in which each group runs its tasks, as data that is checked before it runs.

The size of a step enters; ``TaskLists`` leave. Start reading in ``base.py``, the base class of schedules, and
in ``gpipe.py``, the simplest one. ``check.py`` finds the faults of lists, ``text.py`` reads and writes
them, ``dispatch.py`` makes lists by simulation, and ``families.py`` has all schedules by name.
"""

from mpmd.schedules.base import (
    OneStagePerGroup,
    RoundRobin,
    Schedule,
    TaskLists,
    VShaped,
    round_robin,
    v_shape,
)
from mpmd.schedules.check import check_schedule, total_order
from mpmd.schedules.custom import CustomSchedule
from mpmd.schedules.dispatch import TaskTimes
from mpmd.schedules.dualpipe import DualPipeV
from mpmd.schedules.families import ALL_FAMILIES, FAMILIES, Family, build
from mpmd.schedules.faults import Fault, ScheduleError
from mpmd.schedules.forward_only import ForwardOnly
from mpmd.schedules.gpipe import GPipe, InterleavedGPipe, LoopedBFS
from mpmd.schedules.interleaved import Interleaved1F1B, KimiK2
from mpmd.schedules.list_schedule import ListSchedule
from mpmd.schedules.one_f_one_b import Eager1F1B, Std1F1B
from mpmd.schedules.seq_1f1b import Seq1F1B
from mpmd.schedules.text import from_text, to_text
from mpmd.schedules.v_shaped import VHalf, VMin, ZeroBubbleV
from mpmd.schedules.zero_bubble import InterleavedZeroBubble, ZeroBubble, ZeroBubbleH2

__all__ = [
    "ALL_FAMILIES",
    "FAMILIES",
    "CustomSchedule",
    "DualPipeV",
    "Eager1F1B",
    "Family",
    "Fault",
    "ForwardOnly",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedGPipe",
    "InterleavedZeroBubble",
    "KimiK2",
    "ListSchedule",
    "LoopedBFS",
    "OneStagePerGroup",
    "RoundRobin",
    "Schedule",
    "ScheduleError",
    "Seq1F1B",
    "Std1F1B",
    "TaskLists",
    "TaskTimes",
    "VHalf",
    "VMin",
    "VShaped",
    "ZeroBubble",
    "ZeroBubbleH2",
    "ZeroBubbleV",
    "build",
    "check_schedule",
    "from_text",
    "round_robin",
    "to_text",
    "total_order",
    "v_shape",
]
