"""The details of a choice: its layers, and all numbers of all rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mpmd.planner.candidate import Row
from mpmd.planner.choice_table import (
    MEMORY_PARTS,
    html_page,
    html_table,
    labelled_text,
    terminal_width,
    time_text,
    wrapped,
)
from mpmd.planner.layer_profile import Layer, LayerProfile
from mpmd.util.notebook import ShownAsText
from mpmd.util.tables import human_bytes


@dataclasses.dataclass(frozen=True, repr=False)
class ChoiceDetails(ShownAsText):
    """All numbers of a choice; ``print`` shows them as text, a notebook as a table.

    Attributes:
      heading: the cluster and the choice, as text.
      rows: all candidates, the best first.
      examples: the rows of a batch.
      profiles: the layers of each loop.
    """

    heading: str
    rows: tuple[Row, ...]
    examples: int
    profiles: tuple[LayerProfile, ...]

    def __str__(self) -> str:
        lines = [*self._heading_lines(), ""]
        for number, row in enumerate(self.rows, 1):
            lines += self._row_lines(number, row)
        return "\n".join(lines)

    def to_html(self) -> str:
        """A page with the layers and all rows, which needs no other file."""
        return html_page("mpmd plan", self._heading_text, self.rows, self.examples)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table(self._heading_text, self.rows, self.examples)

    @property
    def _heading_text(self) -> str:
        return "\n".join(self._heading_lines())

    def _heading_lines(self) -> Iterator[str]:
        yield self.heading
        for number, profile in enumerate(self.profiles):
            yield f"layers of loop {number}:" if len(self.profiles) > 1 else "layers:"
            for index, layer in enumerate(profile.layers):
                yield from self._wrapped(f"{index:3}  {_layer_text(layer, profile)}", 5)

    def _row_lines(self, number: int, row: Row) -> Iterator[str]:
        prediction = row.prediction
        yield from self._wrapped(f"{number:3}  {labelled_text(row)}", 5)
        rate = f", {self.examples / prediction.seconds:.4g} examples/s" if prediction.seconds else ""
        yield from self._wrapped(
            f"     step {time_text(prediction)} from {prediction.source}{rate}, bubble "
            f"{max(prediction.bubble, 0):.1%}, all-reduce {prediction.communication:.1%}",
            7,
        )
        memory = prediction.memory
        parts = (f"{part} {human_bytes(getattr(memory, part))}" for part in MEMORY_PARTS)
        yield from self._wrapped(f"     memory {human_bytes(memory.total)}: {', '.join(parts)}", 7)
        if row.reason:
            yield from self._wrapped(f"     {row.reason}", 7)

    def _wrapped(self, text: str, indent: int) -> list[str]:
        """Lines that are not wider than the terminal."""
        return wrapped(text, terminal_width(), indent)


def _layer_text(layer: Layer, profile: LayerProfile) -> str:
    operations = layer.forward.operations + layer.backward.operations
    kept = (
        f"{policy} {human_bytes(layer.recomputation(policy).residuals)}"
        for policy in profile.policies
        if not profile.are_stages
    )
    rows = f"of {profile.microbatch_rows} rows" if profile.microbatch_rows > 1 else "of a row"
    text = (
        f"{layer.name}: {operations * profile.rows / profile.microbatch_rows:.3g} operations a step, weights "
        f"{human_bytes(layer.weights)}"
    )
    has_policies = profile.has_backward and not profile.are_stages
    return f"{text}; kept {rows} by policy: {', '.join(kept)}" if has_policies else text
