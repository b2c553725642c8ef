"""The words and colours of causes, segments and memory.

Most colours are from Okabe and Ito, "Color Universal Design", 2008. People who see red and green alike can
tell neighbouring colours apart.
"""

from __future__ import annotations

from mpmd.render.page.schema import Amount

DARK = {"#c6cad2": "#5d6472", "#d3d7df": "#5d6472", "#882255": "#8f3fd0"}
"""The colours that a dark page has instead: of parts that should not stand out, or hardly would."""


def _part(label: str, colour: str, *hint: str) -> Amount:
    return Amount(label=label, colour=colour, dark=DARK.get(colour, colour), hint=" ".join(hint), total=0)


def with_total(part: Amount, total: int) -> Amount:
    return {**part, "total": total}


CAUSES = {
    "fill": _part(
        "Fill",
        "#c6cad2",
        "The schedule is idle here with equal stages, too: its pipeline fills and drains.",
        "What helps: more microbatches, or another schedule; mpmd.plan compares them.",
    ),
    "imbalance": _part(
        "Imbalance",
        "#e69f00",
        "Groups wait for stages whose tasks take longer than the mean of all stages.",
        "What helps: other marks between stages, or stages that mpmd.plan cuts.",
    ),
    "jitter": _part(
        "Jitter",
        "#d55e00",
        "Groups wait for tasks that took longer than the median of their type.",
        "What helps: cores that no other process uses; the task's processor time says whether it slept.",
    ),
    "message": _part(
        "Message",
        "#0072b2",
        "A message was in flight, from when the sender turned to it until it had come.",
        "What helps: faster links, smaller activations, or fewer stages.",
    ),
    "handling": _part(
        "Handling",
        "#cc79a7",
        "A group's own time between tasks: it takes messages in, sends, frees, and calls executables.",
        "What helps: larger microbatches or fewer stages, so fewer tasks with more work each.",
    ),
    "outside": _part(
        "Outside",
        "#009e73",
        "Groups wait for work outside the loops, such as the optimizer's, of which some groups have more.",
        "What helps: an even division of this work, such as of large weights.",
    ),
    "late_begin": _part(
        "Late begin",
        "#f0e442",
        "From the driver's request until a group had the step's arguments.",
        "What helps: smaller batches, or batches that are on the groups already.",
    ),
    "driver": _part(
        "Driver",
        "#56b4e9",
        "From the driver's call until a group had the request, and from the last reply to the return.",
        "What helps: to call the next step before reading this one's results.",
    ),
    "elsewhere": _part("Elsewhere", "#882255", "Idle time that the ideal schedule has before other tasks."),
}

TASKS = _part("Tasks", "#8fa1c4", "Groups run tasks.")

SIMULATED = {
    "Simulated": "The step with the median times of its tasks, free messages, and nothing between tasks. "
    "The measured step takes longer by messages, handling and jitter: the first findings say which.",
    "Ideal": "The simulated step with equal stages, too: the least that this schedule takes for this work. "
    "More microbatches or another schedule make it shorter: mpmd.plan compares them.",
}

SEGMENTS = {
    "task": TASKS,
    **{cause: CAUSES[cause] for cause in ("message", "handling", "late_begin", "driver")},
}

MEMORY = {
    "parameters": _part("Parameters", "#35618f", "Weights and optimizer state: arguments returned updated."),
    "arguments": _part("Arguments", "#9dc3e6", "Other arguments, such as the batch, and constants."),
    "accumulators": _part("Accumulators", "#882255", "Sums over microbatches, such as gradients."),
    "activations": _part("Activations", "#e69f00", "Residuals and gradients that tasks leave for others."),
    "outside": _part("Outside loops", "#8b93a1", "Values made outside of loops, such as updated weights."),
    "received": _part("Received", "#f0e442", "Values of messages that the group uses."),
    "messages": _part("Messages", "#009e73", "Messages that have come and are not used yet."),
    "temporaries": _part("Temporaries", "#d3d7df", "XLA's own buffers while a task runs."),
}

OUTSIDE = "#8b93a1"
