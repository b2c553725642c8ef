"""The words and colours of causes, segments and memory.

Most colours are those of Okabe and Ito, "Color Universal Design", 2008. All that stand beside one another can
be told apart by people who see red and green alike.
"""

from __future__ import annotations

from mpmd.render.page.schema import Part

CAUSES: dict[str, tuple[str, str, str]] = {
    "fill": (
        "Fill and drain",
        "#c6cad2",
        "the ideal schedule is idle here, too; more microbatches or another schedule make it less",
    ),
    "imbalance": (
        "Unequal stages",
        "#e69f00",
        "stages whose tasks take longer than the mean of all stages",
    ),
    "jitter": ("Slow tasks", "#d55e00", "tasks that took longer than the median of their type"),
    "message": (
        "Messages",
        "#0072b2",
        "messages in flight, from when the sender turned to them until they had come",
    ),
    "handling": (
        "Handling",
        "#cc79a7",
        "a group's own time between tasks: to send, to take in, to free and to start",
    ),
    "outside": (
        "Work outside loops",
        "#009e73",
        "work outside the loops, such as the optimizer's, of which some groups have more",
    ),
    "late_begin": (
        "Late begin",
        "#f0e442",
        "from the driver's request until a group had the step's arguments",
    ),
    "driver": (
        "Driver",
        "#56b4e9",
        "from the driver's call until a group had the request, and from the last reply to the return",
    ),
    "elsewhere": (
        "Elsewhere in the ideal",
        "#882255",
        "idle time that the ideal schedule has before other tasks",
    ),
}
"""For each cause of idle time: its name, its colour, and its meaning."""

SEGMENTS: dict[str, tuple[str, str]] = {
    "task": ("Tasks", "#8fa1c4"),
    **{cause: CAUSES[cause][:2] for cause in ("message", "handling", "late_begin", "driver")},
}
"""For each kind of segment of the critical path: its name and colour. The first is a task."""

MEMORY: dict[str, tuple[str, str, str]] = {
    "parameters": ("Parameters", "#35618f", "weights and optimizer state: arguments returned updated"),
    "arguments": ("Arguments", "#9dc3e6", "other arguments, such as the batch, and constants"),
    "accumulators": ("Accumulators", "#882255", "sums over microbatches, such as gradients"),
    "activations": ("Activations", "#e69f00", "residuals and gradients that tasks leave for other tasks"),
    "outside": ("Outside loops", "#8b93a1", "values made outside of loops, such as updated weights"),
    "received": ("Received", "#f0e442", "values of messages that the group uses"),
    "messages": ("Messages", "#009e73", "messages that have come and are not used yet"),
    "temporaries": ("Temporaries", "#d3d7df", "XLA's own buffers while a task runs"),
}
"""For each purpose of memory: its name, its colour, and its meaning."""

OUTSIDE = "#8b93a1"
"""The colour of tasks outside the loops."""

BUSY = "#8fa1c4"
"""The colour of tasks of all types together."""


def cause_part(cause: str, total: int) -> Part:
    """A cause of idle time; one that has no entry is shown by its own name."""
    label, colour, meaning = CAUSES.get(cause, (cause.replace("_", " ").capitalize(), "#777777", ""))
    return Part(key=cause, label=label, meaning=meaning, colour=colour, total=total)


def segment_part(kind: str, total: int) -> Part:
    """A kind of segment of the critical path."""
    label, colour = SEGMENTS[kind]
    return Part(key=kind, label=label, meaning="", colour=colour, total=total)


def memory_part(kind: str) -> Part:
    """A purpose of memory."""
    label, colour, meaning = MEMORY[kind]
    return Part(key=kind, label=label, meaning=meaning, colour=colour, total=0)
