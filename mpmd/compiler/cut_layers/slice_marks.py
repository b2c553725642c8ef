"""Numbers the marks of a loop whose microbatches are cut into slices.

The user's function is a Python loop over slices with marks in its body. A mark ends the stage after the
stages of the marks that it depends on, as without slices: the values of earlier slices that later slices
read, such as keys, depend only on marks of earlier stages. So each stage but the last has one mark on each
slice, and its nth mark belongs to slice n.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from mpmd.compiler.cut_scans import AS_PYTHON_LOOP
from mpmd.ir.slices import SliceNumbers


def stages_on_slices(depths: Sequence[int], numbers: SliceNumbers) -> Sequence[int] | None:
    """The numbers of the stages that marks end; ``None`` if they do not make the stages of all slices.

    Args:
      depths: for each mark, the number of marks that it depends on, one behind the other.
    """
    ends = collections.Counter[int]()
    numbered: list[int] = []
    for stage in depths:
        numbered.append(numbers.number(stage, ends[stage]))
        ends[stage] += 1
    last = numbers.num_stages - 1  # a mark after the last stage ends nothing
    complete = all(ends[stage] == numbers.slices for stage in range(last))
    allowed = max(ends, default=0) <= last and ends[last] <= numbers.slices
    return numbered if complete and allowed and last > 0 else None


def wrong_marks(
    depths: Sequence[int],
    lines: Sequence[str],
    numbers: SliceNumbers,
    in_scan: bool,
    chosen: bool,
) -> str:
    """The reason why marks do not make the stages of all slices, and the remedy.

    Args:
      lines: where the user wrote each mark.
      in_scan: whether all marks are in the body of one scan.
      chosen: whether ``auto_marks`` has chosen where stages end; the user marked none.
    """
    num_stages, slices = numbers.num_stages, numbers.slices
    if num_stages == 1:
        return ": slices need a model of several stages"
    if chosen or not depths:
        stages = "auto_marks and value_and_grad choose stages of whole microbatches alone. " if chosen else ""
        return (
            f". {stages}Write the loss as a Python loop over the slices, and call mark_stage_end in its body "
            "behind each stage but the last, or use a schedule without slices, such as "
            f"Std1F1B(num_stages={num_stages})"
        )
    ends = collections.Counter(depths)
    deep = next((line for depth, line in zip(depths, lines, strict=True) if depth >= num_stages), None)
    if in_scan and not all(ends[stage] == slices for stage in range(num_stages - 1)):
        return (
            f", all in one lax.scan. {AS_PYTHON_LOOP}. A lax.scan over the layers may stand in it, with "
            f"mark_stage_end(..., num_stages={num_stages})"
        )
    if deep is not None and ends[0] > 0:
        return (
            f". The mark at {deep} depends on {num_stages} or more others, one behind the other: the model "
            "has more stages than the schedule, or a slice hands a value of its last stage to the first "
            "stage of the next. Hand it to the same layer"
        )
    counts = {ends[stage] for stage in range(num_stages - 1)}
    if counts == {1}:
        return (
            ", on one slice: write the loss as a Python loop over the slices, with these marks in its body, "
            f"or use a schedule without slices, such as Std1F1B(num_stages={num_stages})"
        )
    if len(counts) == 1:
        return (
            f", on {counts.pop()} slices: give the loop over slices and the schedule the same number. If a "
            "stage ends with several values, mark them together, as mark_stage_end((x, y))"
        )
    if set(depths) == set(range(max(depths) + 1)) and set(ends.values()) == {slices}:
        marked = max(depths) + 1
        return (
            f". They end {marked} of them in each slice: mark {num_stages - 1 - marked} more, or use a "
            f"schedule with num_stages={marked + 1}"
        )
    few = min(range(num_stages - 1), key=lambda stage: ends[stage])
    return (
        f". Stage {few} ends {ends[few]} times, and each stage has to end once in each slice; mark several "
        "values of a stage together, as mark_stage_end((x, y))"
    )
