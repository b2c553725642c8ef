"""The replay of a captured task: its results against the recorded ones, and what the walk had found.

The command line calls ``replay`` with a ``CapturedTask``, and prints the result by ``text`` or ``as_json``.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jaxlib
import numpy as np

from mpmd.replay.captured_task import CapturedTask, Difference
from mpmd.replay.exported import DevicesError
from mpmd.replay.record import Evaluation, Origin, TaskRecord
from mpmd.replay.values import count_nonfinite, digest_of
from mpmd.util.printable import printable


@dataclasses.dataclass(frozen=True)
class Replay:
    """The outcome of a replay.

    Attributes:
      not_run: why the executable was not run; empty if it was.
      results: the results of the executable by name; empty if it was not run.
      differences: the results that have other bits than recorded.
      elsewhere: the names of the results that have other bits on another machine; ``None`` if no machine was
        compared.
    """

    task: CapturedTask
    not_run: str
    results: Mapping[str, np.ndarray]
    differences: tuple[Difference, ...]
    elsewhere: tuple[str, ...] | None

    @property
    def nonfinite_inputs(self) -> list[str]:
        arrays = self.task.inputs.items()
        return [name for name, array in arrays if array is not None and any(count_nonfinite(array))]

    @property
    def has_fault(self) -> bool:
        evaluation = self.task.record.evaluation
        reaches_result = evaluation is not None and evaluation.reaches_result
        return bool(self.differences or self.elsewhere) or reaches_result

    def digests(self) -> dict[str, str]:
        if self.not_run:
            raise ValueError(
                f"two machines cannot be compared, as the executable was not run: {self.not_run}"
            )
        arrays = {**self.task.inputs, **self.results}
        return {name: digest_of(array) for name, array in arrays.items() if array is not None}


def replay(task: CapturedTask, theirs: Mapping[str, str] | None = None) -> Replay:
    """Runs the executable of a task, and compares its results with the recorded ones.

    Args:
      theirs: ``Replay.digests`` of another machine, to compare with, too.

    Raises: ``ValueError`` for digests of another task, and for a module that cannot be run.
    """
    results: dict[str, np.ndarray] = {}
    not_run = task.not_runnable
    try:
        results = {} if not_run else task.run()
    except DevicesError as error:  # a laptop has no GPU, but can print what the walk has found
        not_run = str(error)
    differences = tuple(task.differences(results)) if results else ()
    result = Replay(task, not_run, results, differences, None)
    if theirs is None:
        return result
    mine = result.digests()
    if mine.keys() != theirs.keys() or any(mine[name] != theirs[name] for name in task.inputs):
        raise ValueError("the digests are those of another task: its operands have other names or bits")
    differing = tuple(name for name in results if mine[name] != theirs[name])
    return dataclasses.replace(result, elsewhere=differing)


def text(result: Replay) -> str:
    """The replay for people, without control characters of the directory."""
    return "\n".join(map(printable, _lines(result)))


def _lines(result: Replay) -> Iterator[str]:
    record = result.task.record
    yield f"{record.text} of group {record.group}, captured {record.written} on {record.device}"
    if record.error:
        yield f"it had failed: {record.error}"
    yield from _about_results(result)
    if result.elsewhere is not None:
        names = ", ".join(result.elsewhere)
        yield f"results with other bits than on the other machine: {names or 'none'}"
    yield f"inputs with NaNs or infinities: {', '.join(result.nonfinite_inputs) or 'none'}"
    if record.evaluation is None:
        yield "no result has a NaN or an infinity"
    else:
        yield from _about_equations(record.evaluation)


def _about_results(result: Replay) -> Iterator[str]:
    known = sum(array is not None for array in result.task.results.values())
    if result.not_run:
        yield f"the executable was not run: {result.not_run}"
    elif not known:
        yield "the executable runs; there are no recorded results to compare with"
    elif not result.differences:
        yield f"{known} results: all have the recorded bits"
    else:
        yield f"{len(result.differences)} of {known} results have other bits than recorded:"
        for difference in result.differences:
            yield f"  {difference.name}, by up to {difference.last_digits} in the last digits"
        if others := _other_versions(result.task.record):
            yield f"  which may be because of other versions: {others}"


def _other_versions(record: TaskRecord) -> str:
    return ", ".join(
        f"{name} {record.versions[name]} there, {version} here"
        for name, version in versions_here().items()
        if record.versions.get(name, version) != version
    )


def versions_here() -> dict[str, str]:
    """The versions on which bits depend."""
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _about_equations(evaluation: Evaluation) -> Iterator[str]:
    yield f"{evaluation.count} equations were evaluated one by one when the task was captured"
    for source, reason in evaluation.skipped:
        yield f"  not {source.primitive} at {source.line or 'an unknown line'}: {reason}"
    first = evaluation.first
    evaluated = " that was evaluated" if evaluation.skipped else ""
    if first is None:
        yield f"no equation{evaluated} makes a NaN or an infinity of finite numbers"
        return
    where = "" if evaluation.reaches_result else f", which no result{evaluated} has"
    article = "an" if first.kind == "infinity" else "a"
    yield f"the first equation that makes {article} {first.kind}{where}:"
    yield from _place(first)
    yield from (f"    of {each}" for each in first.operands)
    yield from (f"    makes {each}" for each in first.results)
    if evaluation.others:
        yield "another equation that makes NaNs or infinities:"
        yield from _place(evaluation.others[0])


def _place(origin: Origin) -> Iterator[str]:
    source = origin.source
    yield f"  {' > '.join(origin.path)}"
    yield f"  {source.line or 'an unknown line'}" + (f", in {source.scope}" if source.scope else "")


def as_json(result: Replay) -> dict[str, Any]:
    record, evaluation = result.task.record, result.task.record.evaluation
    return {
        "task": record.task,
        "text": record.text,
        "group": record.group,
        "error": record.error,
        "fault": result.has_fault,
        "not_run": result.not_run,
        "differences": [dataclasses.asdict(difference) for difference in result.differences],
        "other_machine": result.elsewhere,
        "nonfinite_inputs": result.nonfinite_inputs,
        "evaluation": None if evaluation is None else dataclasses.asdict(evaluation),
    }
