"""Schedules: the order in which each group runs its tasks, as data that is checked before it runs."""

from mpmd.schedules.base import OneStagePerGroup, Schedule
from mpmd.schedules.check import check_schedule, total_order
from mpmd.schedules.gpipe import GPipe
from mpmd.schedules.interleaved import Interleaved1F1B
from mpmd.schedules.one_f_one_b import Eager1F1B, Std1F1B

__all__ = [
    "Eager1F1B",
    "GPipe",
    "Interleaved1F1B",
    "OneStagePerGroup",
    "Schedule",
    "Std1F1B",
    "check_schedule",
    "total_order",
]
