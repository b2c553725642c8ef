"""The words and colours of causes, segments and memory.

Most colours are those of Okabe and Ito, "Color Universal Design", 2008. All that stand beside one another can
be told apart by people who see red and green alike.
"""

from __future__ import annotations

from typing import NamedTuple

from mpmd.render.page.schema import Part


class Look(NamedTuple):
    """The looks of a part: its name, a gloss of a few words, its colour, and its meaning."""

    label: str
    gloss: str
    colour: str
    meaning: str

    @property
    def dark(self) -> str:
        """The colour on a dark page."""
        return DARK.get(self.colour, self.colour)

    def part(self, key: str, total: int = 0) -> Part:
        """The part with a sum."""
        return Part(
            key=key,
            label=self.label,
            gloss=self.gloss,
            meaning=self.meaning,
            colour=self.colour,
            dark=self.dark,
            total=total,
        )


DARK = {"#c6cad2": "#5d6472", "#d3d7df": "#5d6472", "#882255": "#8f3fd0"}
"""The colours that a dark page has instead: of parts that should not stand out, or hardly would."""

CAUSES = {
    "fill": Look(
        "Fill",
        "of the schedule itself",
        "#c6cad2",
        "the schedule is idle here with equal stages, too: its pipeline fills and drains",
    ),
    "imbalance": Look(
        "Imbalance",
        "unequal stages",
        "#e69f00",
        "stages whose tasks take longer than the mean of all stages",
    ),
    "jitter": Look("Jitter", "slow tasks", "#d55e00", "tasks that took longer than the median of their type"),
    "message": Look(
        "Message",
        "in flight",
        "#0072b2",
        "messages in flight, from when the sender turned to them until they had come",
    ),
    "handling": Look(
        "Handling",
        "between tasks",
        "#cc79a7",
        "a group's own time between tasks: to send, to take in, to free and to start",
    ),
    "outside": Look(
        "Outside",
        "of the loops",
        "#009e73",
        "work outside the loops, such as the optimizer's, of which some groups have more",
    ),
    "late_begin": Look(
        "Late begin",
        "arguments came late",
        "#f0e442",
        "from the driver's request until a group had the step's arguments",
    ),
    "driver": Look(
        "Driver",
        "requests and replies",
        "#56b4e9",
        "from the driver's call until a group had the request, and from the last reply to the return",
    ),
    "elsewhere": Look(
        "Elsewhere",
        "idle at another place in the ideal",
        "#882255",
        "idle time that the ideal schedule has before other tasks",
    ),
}
"""The causes of idle time, by the names of ``Causes``."""

TASKS = Look("Tasks", "", "#8fa1c4", "the time in which groups run tasks")
"""Tasks of all types together."""

SEGMENTS = {
    "task": TASKS,
    **{cause: CAUSES[cause] for cause in ("message", "handling", "late_begin", "driver")},
}
"""The kinds of segments of the critical path. The first is a task."""

MEMORY = {
    "parameters": Look(
        "Parameters", "", "#35618f", "weights and optimizer state: arguments returned updated"
    ),
    "arguments": Look("Arguments", "", "#9dc3e6", "other arguments, such as the batch, and constants"),
    "accumulators": Look("Accumulators", "", "#882255", "sums over microbatches, such as gradients"),
    "activations": Look("Activations", "", "#e69f00", "residuals and gradients that tasks leave for others"),
    "outside": Look("Outside loops", "", "#8b93a1", "values made outside of loops, such as updated weights"),
    "received": Look("Received", "", "#f0e442", "values of messages that the group uses"),
    "messages": Look("Messages", "", "#009e73", "messages that have come and are not used yet"),
    "temporaries": Look("Temporaries", "", "#d3d7df", "XLA's own buffers while a task runs"),
}
"""The purposes of memory, by the names of ``MemoryParts``."""

OUTSIDE = "#8b93a1"
"""The colour of tasks outside the loops."""
