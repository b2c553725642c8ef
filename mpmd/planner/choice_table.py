"""Rows of a choice: as a table for a terminal, as data for JSON, and with all numbers and layers. No JAX."""

from __future__ import annotations

import dataclasses
import html
import itertools
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from mpmd.language.remat import Remat
from mpmd.planner.candidate import Candidate, Prediction, Row
from mpmd.planner.layer_profile import Layer, LayerProfile
from mpmd.planner.submesh import INNERMOST_FIRST, Submesh
from mpmd.util.notebook import ShownAsText
from mpmd.util.tables import aligned, first_few, human_bytes, ranges

Value = TypeVar("Value")

_COLUMNS = {"": "", "step": "step", "bubble": "bubble", "memory": "peak memory", "from": "from"}
"""The columns of the table for a terminal, each with the name of its cell in ``_cells``."""
_TEXT_COLUMNS = ("candidate", "from", "why not")
"""The columns that a page aligns to the left."""
_LONGEST_REASON = 120


def candidate_text(candidate: Candidate) -> str:
    """A candidate in a few words, such as ``4 groups of data 2 model 4, Std1F1B, 8 microbatches``."""
    shared = ["FSDP gathered once" if candidate.gather_once else "FSDP"] * candidate.fsdp
    shared += ["sequence parallel"] * candidate.sequence_parallel
    if not candidate.later:
        return ", ".join([_groups_text(candidate), _loop_text(candidate), *shared])
    loops = (
        f"loop{'' if numbers.isdigit() else 's'} {numbers}: {text}"
        for numbers, text in _alike(map(_loop_text, candidate.loops))
    )
    return "; ".join([", ".join([_groups_text(candidate), *shared]), *loops])


def _groups_text(candidate: Candidate) -> str:
    groups = _alike(map(_submesh_text, candidate.submeshes))
    number, (_, first) = len(candidate.submeshes), groups[0]
    if len(groups) == 1:
        return first if number == 1 else f"{number} groups of {first}"
    return "groups " + "; ".join(f"{numbers}: {text}" for numbers, text in groups)


def _submesh_text(submesh: Submesh) -> str:
    sizes = ((axis, submesh[axis]) for axis in reversed(INNERMOST_FIRST))
    text = " ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one device"
    return f"{text} of {submesh.pool}" if submesh.pool else text


def _loop_text(candidate: Candidate) -> str:
    parts, layers = [], candidate.layers_per_stage
    if candidate.schedule.mpmd_dim > 1 or len(layers) > 1:
        parts.append(candidate.schedule_text)
    if len(layers) > candidate.schedule.mpmd_dim:
        parts.append(f"{len(layers)} stages")
    number = candidate.num_microbatches
    parts.append(f"{number} microbatch{'es' if number > 1 else ''}")
    if len(set(layers)) > 1:
        runs = (f"{length}x{count}" if count > 1 else str(length) for length, count in _runs(layers))
        parts.append(f"layers {' '.join(runs)}")
    if candidate.remat == (Remat.NOTHING_SAVEABLE,):
        parts.append("remat")
    elif len(candidate.remat) == 1 and candidate.is_rematerialised:
        parts.append(f"remat {candidate.remat[0]}")
    elif candidate.is_rematerialised:
        parts.append("remat " + ", ".join(f"{policy} x{count}" for policy, count in _runs(candidate.remat)))
    return ", ".join(parts)


def _runs(values: Iterable[Value]) -> Iterator[tuple[Value, int]]:
    return ((value, len([*members])) for value, members in itertools.groupby(values))


def _alike(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Each text once, behind its positions, such as ``0..1, 3``."""
    positions: dict[str, list[str]] = {}
    for position, text in enumerate(texts):
        positions.setdefault(text, []).append(str(position))
    return [(", ".join(ranges(numbers)), text) for text, numbers in positions.items()]


def text_table(rows: Sequence[Row], shown: int, width: int) -> str:
    """The best rows, and the rows with a label, as a table that is not wider than ``width`` characters.

    Rows that differ in the schedule alone are one row.

    Args:
      shown: number of the best rows to show; the last line counts the remaining rows.
    """
    alike: dict[Any, list[tuple[int, Row]]] = {}
    for number, row in enumerate(rows, 1):
        alike.setdefault(_but_for_schedule(row), []).append((number, row))
    picked = [of_rank for rank, of_rank in enumerate(alike.values()) if rank < shown or of_rank[0][1].label]
    entries = (
        (number, row, [_reason_text(row, [other for _, other in others])])
        for (number, row), *others in picked
    )
    lines = [*_lines([*entries], width)]
    if left_out := len(rows) - sum(map(len, picked)):
        lines.append(f"and {left_out} more candidates; choice.details() has all")
    return "\n".join(lines)


def _but_for_schedule(row: Row) -> Any:
    candidate = row.candidate
    return (
        row.label,
        candidate.shared,
        tuple((loop.layers_per_stage, loop.num_microbatches, loop.remat) for loop in candidate.loops),
        row.prediction.source == "formula",
    )


def _reason_text(row: Row, others: Sequence[Row]) -> str:
    reason = textwrap.shorten(row.reason, _LONGEST_REASON, placeholder=" …")
    if not others:
        return reason
    names = (
        f"{' and '.join(dict.fromkeys(loop.schedule_text for loop in other.candidate.loops))} "
        f"{other.prediction.seconds / row.prediction.seconds:.2f}"
        for other in others
    )
    return "; ".join(filter(None, [reason, f"with {first_few(names)} times"]))


def _lines(entries: Sequence[tuple[int, Row, Sequence[str]]], width: int) -> Iterator[str]:
    """The lines of a table of numbered rows, each with texts below its candidate."""
    cells = [_cells(number, row) for number, row, _ in entries]
    numbers = aligned([[*_COLUMNS], *([of_row[name] for name in _COLUMNS.values()] for of_row in cells)], {4})
    indent = max(map(len, numbers)) + 2
    yield f"{numbers[0]:{indent}}candidate, and why not"
    for line, of_row, (_, _, texts) in zip(numbers[1:], cells, entries, strict=True):
        first, *rest = wrapped(of_row["candidate"], width - indent)
        yield f"{line:{indent}}{first}"
        rest += (below for text in texts for below in wrapped(text and f"  {text}", width - indent, 2))
        yield from (" " * indent + below for below in rest)


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def terminal_width() -> int:
    return min(120, max(80, shutil.get_terminal_size((100, 24)).columns))


def _cells(number: int, row: Row, examples: int = 0) -> dict[str, str]:
    prediction, memory = row.prediction, row.prediction.memory
    return {
        "": str(number),
        "candidate": f"{row.label}: {candidate_text(row.candidate)}".removeprefix(": "),
        "step": time_text(prediction),
        "examples/s": f"{examples / prediction.seconds:.4g}" if prediction.seconds else "",
        "bubble": f"{max(prediction.bubble, 0):.1%}",
        "all-reduce": f"{prediction.communication:.1%}",
        "peak memory": human_bytes(memory.total),
        **{part: human_bytes(nbytes) for part, nbytes in memory.parts.items()},
        "from": prediction.source,
        "why not": textwrap.shorten(row.reason, _LONGEST_REASON, placeholder=" …"),
    }


def time_text(prediction: Prediction) -> str:
    return f"{seconds_text(prediction.seconds)} ±{prediction.expected_error:.0%}"


def seconds_text(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def row_data(row: Row, examples: int) -> dict[str, Any]:
    """A row as data: seconds, bytes and shares. The fields of ``candidate`` describe the first loop."""
    candidate, prediction = row.candidate, row.prediction
    return {
        "candidate": {
            "text": candidate_text(candidate),
            "groups": len(candidate.submeshes),
            "submeshes": [dict(submesh) for submesh in candidate.submeshes],
            **_pools_data(candidate),
            **_loop_data(candidate),
            "later_loops": [_loop_data(loop) for loop in candidate.later],
            "fsdp": candidate.fsdp,
            "gather_once": candidate.gather_once,
            "sequence_parallel": candidate.sequence_parallel,
        },
        "label": row.label,
        "seconds": prediction.seconds,
        "expected_error": prediction.expected_error,
        "examples_per_second": examples / prediction.seconds if prediction.seconds else None,
        "bubble": prediction.bubble,
        "communication": prediction.communication,
        "memory": {**dataclasses.asdict(prediction.memory), "total": prediction.memory.total},
        "stage_seconds": list(prediction.stage_seconds),
        "source": prediction.source,
        "reason": row.reason,
    }


def _pools_data(candidate: Candidate) -> dict[str, Any]:
    pools = [submesh.pool for submesh in candidate.submeshes]
    return {"pools": pools} if any(pools) else {}


def _loop_data(candidate: Candidate) -> dict[str, Any]:
    return {
        "layers_per_stage": list(candidate.layers_per_stage),
        "schedule": candidate.schedule.name,
        "num_stages": candidate.schedule.num_stages,
        "slices": candidate.schedule.slices,
        "num_microbatches": candidate.num_microbatches,
        "remat": candidate.is_rematerialised,
        "remat_policies": list(candidate.remat),
    }


_STYLE = """
body { font-family: system-ui, sans-serif; margin: 2em; color: #222 }
table { border-collapse: collapse; font-size: 90% }
th, td { padding: 0.3em 0.8em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
td.text, th.text { text-align: left }
tr.best { background: #e8f4ea; font-weight: 600 }
pre { background: #f6f6f6; padding: 1em }
"""


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
        entries = [(number, row, [*self._texts(number, row)]) for number, row in enumerate(self.rows, 1)]
        return "\n".join([*self._heading_lines(), "", *_lines(entries, terminal_width())])

    def _texts(self, number: int, row: Row) -> Iterator[str]:
        """The numbers of a row for which the table for a terminal has no columns, and the reason."""
        cells, of_row = _cells(number, row, self.examples), row.prediction.memory.parts
        yield ", ".join(f"{name} {cells[name]}" for name in ("examples/s", "all-reduce", *of_row))
        yield row.reason

    def to_html(self) -> str:
        """A page with the layers and all rows, which needs no other file."""
        head = f'<meta charset="utf-8"><title>mpmd plan</title>\n<style>{_STYLE}</style>'
        body = f"<h1>mpmd plan</h1>\n{self._repr_html_()}"
        return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'

    def _repr_html_(self) -> str:
        cells = [_cells(number, row, self.examples) for number, row in enumerate(self.rows, 1)]
        lines = [f"<pre>{html.escape(chr(10).join(self._heading_lines()))}</pre>", "<table>"]
        lines.append(_html_row("th", dict(zip(cells[0], cells[0], strict=True))))
        lines += [_html_row("td", of_row, "" if i else "best") for i, of_row in enumerate(cells)]
        return "\n".join([*lines, "</table>"])

    def _heading_lines(self) -> Iterator[str]:
        yield self.heading
        for number, profile in enumerate(self.profiles):
            yield f"layers of loop {number}:" if len(self.profiles) > 1 else "layers:"
            for index, layer in enumerate(profile.layers):
                yield from wrapped(f"{index:3}  {_layer_text(layer, profile)}", terminal_width(), 5)


def _layer_text(layer: Layer, profile: LayerProfile) -> str:
    operations = layer.forward.operations + layer.backward.operations
    text = (
        f"{layer.name}: {operations * profile.rows / profile.microbatch_rows:.3g} operations a step, weights "
        f"{human_bytes(layer.weights)}"
    )
    if profile.are_stages or not profile.has_backward:
        return text
    rows = f"of {profile.microbatch_rows} rows" if profile.microbatch_rows > 1 else "of a row"
    kept = (f"{policy} {human_bytes(layer.recomputation(policy).residuals)}" for policy in profile.policies)
    return f"{text}; kept {rows} by policy: {', '.join(kept)}"


def _html_row(tag: str, cells: dict[str, str], kind: str = "") -> str:
    texts = (
        f"<{tag}{' class=text' if name in _TEXT_COLUMNS else ''}>{html.escape(cell)}</{tag}>"
        for name, cell in cells.items()
    )
    return f"<tr{f' class={kind}' if kind else ''}>{''.join(texts)}</tr>"
