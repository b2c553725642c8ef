"""A task that was captured, read from its directory: its values, its equations, and what becomes of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from mpmd.replay.check import check_equations
from mpmd.replay.evaluate import Call, Evaluated, Evaluator, Origin, Value, text_of
from mpmd.replay.exported import DevicesError, function_of
from mpmd.replay.files import read_equations, read_member, read_task
from mpmd.replay.modules import MAIN, Module
from mpmd.replay.record import (
    EQUATIONS,
    INPUTS,
    RESULTS,
    TASK,
    Equations,
    Export,
    Single,
    Source,
    TaskRecord,
    Unportable,
    ValueRecord,
)
from mpmd.replay.values import count_nonfinite, digest_of, from_bytes, last_digits, nbytes_of
from mpmd.util.guarded_files import naming, opened
from mpmd.util.printable import printable
from mpmd.util.tables import first_few
from mpmd.validation import path_fault, raise_faults


def load(directory: str | os.PathLike[str]) -> CapturedTask:
    """Reads the directory of a captured task.

    Args:
      directory: that of ``step.capture(..., to=...)``, or one that ``capture=`` of a mesh has written.

    Raises: ``ValueError`` when it is of another format, or damaged; ``OSError`` when it cannot be read.
    """
    raise_faults(path_fault("directory", directory))
    path = Path(directory)
    record = read_task(path)
    inputs = _values(path / INPUTS, record.inputs)
    results = _values(path / RESULTS, record.results)
    equations = read_equations(path)
    with naming(path / EQUATIONS):
        check_equations(equations, record)
    return CapturedTask(path, record, inputs, results, equations)


def _values(path: Path, values: Sequence[ValueRecord]) -> list[np.ndarray | None]:
    """The arrays of a file of values. Raises ``ValueError`` when they are not those that were written."""
    with naming(path), opened(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        sizes = [nbytes_of(value.dtype, value.shape) if value.is_stored else 0 for value in values]
        if sum(sizes) != num_bytes:  # before any memory is taken
            raise ValueError(f"it has {num_bytes} bytes, and the values of {TASK} have {sum(sizes)}")
        return [
            _value(value, np.fromfile(file, np.uint8, size)) if value.is_stored else None
            for value, size in zip(values, sizes, strict=True)
        ]


def _value(value: ValueRecord, raw: np.ndarray) -> np.ndarray:
    try:
        array = from_bytes(raw, value.dtype, value.shape)
    except (ValueError, OverflowError) as error:  # without elements, an array may have any shape
        raise ValueError(f"{value.name}: {error}") from None
    if digest_of(array) != value.digest:
        raise ValueError(f"{value.name} has other bytes than were written")
    return array


@dataclasses.dataclass(frozen=True)
class Difference:
    """A result with other bits than recorded.

    Attributes:
      name: its name in the plan.
      last_digits: the most representable numbers between two elements; ``None`` where the recorded bytes are
        not in the directory.
    """

    name: str
    last_digits: int | None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The equations of a task, evaluated one by one.

    Attributes:
      first: the first equation that makes a NaN or an infinity which is then in a result; where none is in a
        result, the first one; ``None`` where all is finite, or not finite in the inputs already. Results
        that the task passes on count before those that it keeps, and NaNs before infinities.
      reaches_result: whether a result has what it makes.
      others: the other equations that have made NaNs or infinities.
      results: the values of the results; ``None`` where one is not known.
      skipped: the primitives that have no portable form, with the user's line and the reason.
      count: the number of equations, each as often as it was evaluated.
    """

    first: Origin | None
    reaches_result: bool
    others: tuple[Origin, ...]
    results: tuple[np.ndarray | None, ...]
    skipped: tuple[tuple[Source, str], ...]
    count: int


class CapturedTask:
    """A task of a step with its inputs, as ``mpmd.replay.load`` returns it.

    Attributes:
      directory: where it is.
      record: the task, its process and its versions.
      equations: those of the task.
    """

    def __init__(
        self,
        directory: Path,
        record: TaskRecord,
        inputs: Sequence[np.ndarray | None],
        results: Sequence[np.ndarray | None],
        equations: Equations,
    ):
        self.directory = directory
        self.record = record
        self.equations = equations
        self._inputs = tuple(inputs)
        self._results = {
            value.name: array
            for value, array in zip(record.results, results, strict=True)
            if array is not None
        }
        self._call_of = functools.cache(self._function)
        self._module_of = functools.cache(lambda file: Module(read_member(directory / EQUATIONS, file)))

    @property
    def inputs(self) -> dict[str, np.ndarray | None]:
        """The operands by their names in the plan; ``None`` for one that was lost.

        Typed keys are the integers inside.
        """
        return {value.name: array for value, array in zip(self.record.inputs, self._inputs, strict=True)}

    @property
    def results(self) -> dict[str, np.ndarray]:
        """The results as they were, by their names, without those that are too large for the directory."""
        return dict(self._results)

    def __repr__(self) -> str:
        failed = f", which had failed: {self.record.error}" if self.record.error else ""
        return printable(
            f"{self.record.text} of group {self.record.group} with {len(self._inputs)} inputs and "
            f"{len(self.record.results)} results{failed}"
        )

    @property
    def not_runnable(self) -> str:
        """The reason why the executable cannot run; empty if it can."""
        if self.record.without_executable:
            return f"it has no portable form: {self.record.without_executable}"
        if lost := [name for name, array in self.inputs.items() if array is None]:
            return (
                f"{first_few(lost)}: lost, because the task had taken them over when it failed. With "
                "jax.debug_nans or jax.debug_infs, and with step.capture, such inputs are copied before"
            )
        return ""

    def run(self) -> dict[str, np.ndarray]:
        """Runs the executable. Returns the results by their names in the plan.

        Raises: ``ValueError`` when an input was lost, when there is no executable, with the reason, or when
          JAX has fewer devices here than the group, with the variable that changes that.
        """
        if self.not_runnable:
            raise ValueError(self.not_runnable)
        assert self.equations.executable is not None, "there is a reason where there is none"
        results = self._call_of(self.equations.executable)(
            *[array for array in self._inputs if array is not None]
        )
        return {value.name: array for value, array in zip(self.record.results, results, strict=True)}

    def differences(self, results: Mapping[str, np.ndarray]) -> list[Difference]:
        """The results of ``run`` whose bits are not the recorded ones."""
        differing = [
            value.name
            for value in self.record.results
            if value.digest is not None and digest_of(results[value.name]) != value.digest
        ]
        return [
            Difference(
                name, last_digits(results[name], self._results[name]) if name in self._results else None
            )
            for name in differing
        ]

    def evaluate(self, observe: Callable[[Evaluated], object] | None = None) -> Evaluation:
        """Evaluates the equations one by one, into loops and branches.

        Their bits are not those of the executable, in which XLA has fused equations.

        Args:
          observe: a function that is called with each ``Evaluated`` equation, in order.
        """
        evaluator = Evaluator(self.equations, self._call_of, observe or (lambda evaluated: None))
        results = evaluator.run(self._inputs)
        reaching = self._origin_in(results)
        first = reaching or next(iter(evaluator.origins), None)
        return Evaluation(
            first=first,
            reaches_result=reaching is not None,
            others=tuple(origin for origin in evaluator.origins if origin is not first),
            results=tuple(value.array for value in results),
            skipped=tuple(map(self._skipped, evaluator.skipped)),
            count=evaluator.count,
        )

    def digests(self) -> list[tuple[str, str]]:
        """The path of each equation that is evaluated, with a digest of its results, to compare machines."""
        digests: list[tuple[str, str]] = []
        self.evaluate(lambda evaluated: digests.append((text_of(evaluated.path), digest(evaluated))))
        return digests

    def _origin_in(self, results: Sequence[Value]) -> Origin | None:
        """The origin of what is not finite in the results: the first one of those that matter most."""
        ranks: dict[tuple[bool, bool, int], Origin] = {}
        for record, value in zip(self.record.results, results, strict=True):
            if value.array is not None and value.origin is not None:
                has_nans = count_nonfinite(value.array)[0] > 0
                ranks[not record.is_passed_on, not has_nans, value.origin.number] = value.origin
        return ranks[min(ranks)] if ranks else None

    def _skipped(self, equation: Single) -> tuple[Source, str]:
        function = self.equations.exports[equation.export]
        assert isinstance(function, Unportable), "it was skipped because it has no portable form"
        return self.equations.sources[equation.source], function.reason

    def _function(self, number: int) -> Call:
        """The function of one of the exports. Raises ``ValueError`` when it cannot be run."""
        export = self.equations.exports[number]
        assert isinstance(export, Export), "there is nothing to run without a portable form"
        place = f"{self.directory / EQUATIONS}: {export.function} of {export.file}"
        with _refusing(place):
            module = self._module_of(export.file)
        if module.faults:
            few = first_few(module.faults)
            raise ValueError(f"{place} is not run: it has {few}, which may do more than compute")
        with _refusing(place):
            code = module.code if export.function == MAIN else module.alone(export.function)
            function = function_of(export, code, self.record.submesh)

        def run(*arrays: np.ndarray) -> Sequence[np.ndarray]:
            with _refusing(place):
                return function(*arrays)

        return run


@contextlib.contextmanager
def _refusing(place: str) -> Iterator[None]:
    """Has errors of JAX, which has many kinds for code that it cannot read, be a ``ValueError``."""
    try:
        yield
    except DevicesError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{place} cannot run with JAX {jax.__version__}: {text}") from error


def digest(evaluated: Evaluated) -> str:
    """A digest of the results of an equation."""
    return " ".join(map(digest_of, evaluated.results))
