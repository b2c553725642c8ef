"""The replay of a captured task: its results against the recorded ones, and the origins of NaNs."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jaxlib

from mpmd.replay.captured_task import CapturedTask, Difference, Evaluation, digest
from mpmd.replay.evaluate import Evaluated, Origin, text_of
from mpmd.replay.exported import DevicesError
from mpmd.replay.record import Source, TaskRecord
from mpmd.replay.values import Range


class Digests:
    """Compares the equations of a task with those of another machine, while they are evaluated.

    Args:
      expected: the digests of the other machine; ``None`` to take them down alone.

    Attributes:
      compares: whether there are such.
      digests: those of this machine.
      differing: the first equation that makes other bits.
    """

    def __init__(self, expected: Sequence[Sequence[str]] | None):
        self._expected = expected
        self.compares = expected is not None
        self.digests: list[tuple[str, str]] = []
        self.differing: Evaluated | None = None

    def observe(self, evaluated: Evaluated) -> None:
        """Notes an equation. Raises ``ValueError`` when the digests are those of another task."""
        mine = (text_of(evaluated.path), digest(evaluated))
        position = len(self.digests)
        self.digests.append(mine)
        if self._expected is None or self.differing is not None:
            return
        theirs = self._expected[position] if position < len(self._expected) else (None, None)
        if theirs[1] == mine[1]:
            return
        if theirs[0] != mine[0]:
            raise ValueError(
                f"the digests are those of another task: equation {position} is {theirs[0]}, not {mine[0]}"
            )
        self.differing = evaluated


@dataclasses.dataclass(frozen=True)
class Replay:
    """The outcome of a replay.

    Attributes:
      not_run: why the executable was not run; empty if it was.
      differences: the results of the executable that have other bits than recorded.
      nonfinite_inputs: the names of the inputs that have NaNs or infinities.
      compared: whether equations were compared with those of another machine.
      differing: the first equation that makes other bits than on another machine, if that was asked for.
    """

    task: CapturedTask
    not_run: str
    differences: tuple[Difference, ...]
    nonfinite_inputs: tuple[str, ...]
    evaluation: Evaluation
    compared: bool
    differing: Evaluated | None

    @property
    def has_fault(self) -> bool:
        """Whether a result has other bits, or an equation makes a NaN or an infinity that a result has."""
        return bool(self.differences or self.differing) or self.evaluation.reaches_result


def replay(task: CapturedTask, digests: Digests | None = None) -> Replay:
    """Runs the executable of a task, and evaluates its equations.

    Args:
      digests: takes down, or compares, what the equations make.

    Raises: ``ValueError`` for digests of another task, and for a ``shard_map`` with too few devices here.
    """
    differences: tuple[Difference, ...] = ()
    not_run = task.not_runnable
    try:
        if not not_run:
            differences = tuple(task.differences(task.run()))
    except DevicesError as error:  # a laptop has no GPU, but can evaluate the equations
        not_run = str(error)
    evaluation = task.evaluate(None if digests is None else digests.observe)
    nonfinite = tuple(value.name for value in task.record.inputs if value.num_nans or value.num_infs)
    return Replay(
        task=task,
        not_run=not_run,
        differences=differences,
        nonfinite_inputs=nonfinite,
        evaluation=evaluation,
        compared=digests is not None and digests.compares,
        differing=None if digests is None else digests.differing,
    )


def text(result: Replay) -> str:
    """The replay for people."""
    return "\n".join(_lines(result))


def _lines(result: Replay) -> Iterator[str]:
    record, evaluation = result.task.record, result.evaluation
    yield f"{record.text} of group {record.group}, captured {record.written} on {record.device}"
    if record.error:
        yield f"it had failed: {record.error}"
    yield from _about_results(result)
    yield f"inputs with NaNs or infinities: {', '.join(result.nonfinite_inputs) or 'none'}"
    yield f"{evaluation.count} equations evaluated one by one"
    for source, reason in evaluation.skipped:
        yield f"  not {source.primitive} at {source.line or 'an unknown line'}: {reason}"
    if result.compared:
        yield from _about_difference(result.differing)
    yield from _about_origin(evaluation)


def _about_results(result: Replay) -> Iterator[str]:
    record = result.task.record
    known = sum(value.digest is not None for value in record.results)
    if result.not_run:
        yield f"the executable was not run: {result.not_run}"
        return
    if not known:
        yield "the executable runs; there are no recorded results to compare with"
        return
    if not result.differences:
        yield f"{known} results: all have the recorded bits"
        return
    yield f"{len(result.differences)} of {known} results have other bits than recorded:"
    for difference in result.differences:
        digits = difference.last_digits
        yield f"  {difference.name}" + ("" if digits is None else f", by up to {digits} in the last digits")
    if others := _other_versions(record):
        yield f"  which may be because of other versions: {others}"


def _other_versions(record: TaskRecord) -> str:
    here = versions_here()
    differing = {name: version for name, version in record.versions.items() if here.get(name) != version}
    return ", ".join(
        f"{name} {there} there, {here[name]} here" for name, there in differing.items() if name in here
    )


def versions_here() -> dict[str, str]:
    """The versions on which bits depend."""
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _about_difference(differing: Evaluated | None) -> Iterator[str]:
    if differing is None:
        yield "all equations make the bits of the other machine"
        return
    yield "the first equation that makes other bits than the other machine:"
    yield from _equation(differing.path, differing.source)
    yield from _values(map(Range.of, differing.operands), map(Range.of, differing.results))


def _about_origin(evaluation: Evaluation) -> Iterator[str]:
    first = evaluation.first
    if first is None:
        yield "no equation makes a NaN or an infinity of finite numbers"
        return
    where = "" if evaluation.reaches_result else ", which no result has"
    article = "an" if first.kind == "infinity" else "a"
    yield f"the first equation that makes {article} {first.kind}{where}:"
    yield from _equation(first.path, first.source)
    yield from _values(first.operands, first.results)
    if evaluation.others:
        yield f"{len(evaluation.others)} more make NaNs or infinities; the first of them:"
        yield from _equation(evaluation.others[0].path, evaluation.others[0].source)


def _equation(path: Sequence[str], source: Source) -> Iterator[str]:
    yield f"  {text_of(path)}"
    yield f"  {source.line or 'an unknown line'}" + (f", in {source.scope}" if source.scope else "")


def _values(operands: Any, results: Any) -> Iterator[str]:
    yield from (f"    of {each}" for each in operands)
    yield from (f"    makes {each}" for each in results)


def as_json(result: Replay) -> dict[str, Any]:
    """The replay for programs."""
    record, evaluation, differing = result.task.record, result.evaluation, result.differing
    return {
        "task": record.task,
        "text": record.text,
        "group": record.group,
        "error": record.error,
        "fault": result.has_fault,
        "not_run": result.not_run,
        "differences": [dataclasses.asdict(difference) for difference in result.differences],
        "nonfinite_inputs": list(result.nonfinite_inputs),
        "equations": evaluation.count,
        "skipped": [
            {**dataclasses.asdict(source), "reason": reason} for source, reason in evaluation.skipped
        ],
        "first": None if evaluation.first is None else _origin(evaluation.first),
        "reaches_result": evaluation.reaches_result,
        "others": [_origin(origin) for origin in evaluation.others],
        "first_difference": None
        if differing is None
        else {"path": list(differing.path), **dataclasses.asdict(differing.source)},
    }


def _origin(origin: Origin) -> dict[str, Any]:
    return {
        "kind": origin.kind,
        "path": list(origin.path),
        **dataclasses.asdict(origin.source),
        "operands": [dataclasses.asdict(each) for each in origin.operands],
        "results": [dataclasses.asdict(each) for each in origin.results],
    }
