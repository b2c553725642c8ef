"""Checks that the equations of a directory belong together, before any is evaluated."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from mpmd.replay.record import (
    MOST_DEVICES,
    Block,
    Conditional,
    Constant,
    Equation,
    Equations,
    Export,
    Scan,
    Single,
    TaskRecord,
    Unportable,
    While,
)
from mpmd.replay.values import constant_of, nbytes_of


def check_equations(equations: Equations, record: TaskRecord) -> None:
    """Checks the numbers of values, sources and exports of a task.

    Raises: ``ValueError`` with the first fault and its place.
    """
    num_inputs, num_results = len(record.inputs), len(record.results)
    for export in equations.exports:
        if isinstance(export, Export):
            _check_export(export)
    if (equations.executable is None) != bool(record.without_executable):
        raise ValueError("executable is not as the record says")
    if equations.executable is not None:
        _check_position("executable", equations.executable, equations.exports)
        executable = equations.exports[equations.executable]
        if isinstance(executable, Unportable):
            raise ValueError("executable has no portable form")
        _check_counts("executable", executable.inputs, executable.outputs, num_inputs, num_results)
    _check_block("block", equations.block, equations, num_inputs, num_results)


def _check_export(export: Export) -> None:
    for kind in (*export.inputs, *export.outputs):
        if nbytes_of(kind.dtype, kind.shape) >= 2**63:
            raise ValueError(f"exports: no array has the shape {kind.shape}")
    if not 1 <= export.num_devices <= MOST_DEVICES or not export.platforms:
        raise ValueError(f"exports: nothing runs on {export.num_devices} of {export.platforms}")


def _check_block(place: str, block: Block, equations: Equations, num_inputs: int, num_results: int) -> None:
    _check_counts(place, block.inputs, block.outputs, num_inputs, num_results)
    known = set(block.inputs)
    for position, equation in enumerate(block.equations):
        here = f"{place} > equation {position}"
        if isinstance(equation, Constant):
            constant_of(equation.data, equation.dtype, equation.shape)
            known.add(equation.makes)
            continue
        _check_known(here, equation.reads, known)
        _check_position(f"{here}: source", equation.source, equations.sources)
        _check_equation(here, equation, equations)
        known.update(equation.makes)
    _check_known(place, block.outputs, known)


def _check_equation(here: str, equation: Equation, equations: Equations) -> None:
    match equation:
        case Single():
            _check_position(f"{here}: export", equation.export, equations.exports)
            function = equations.exports[equation.export]
            if isinstance(function, Export):
                num_operands, num_results = len(equation.reads), len(equation.makes)
                _check_counts(here, function.inputs, function.outputs, num_operands, num_results)
        case Scan():
            _check_least(here, equation.num_consts, equation.num_carry, equation.length)
            num_stacked = len(equation.reads) - equation.num_consts - equation.num_carry
            _check_least(here, num_stacked, len(equation.makes) - equation.num_carry)
            _check_block(here, equation.body, equations, len(equation.reads), len(equation.makes))
        case Conditional():
            _check_least(here, len(equation.reads) - 1, len(equation.branches) - 1)
            for branch in equation.branches:
                _check_block(here, branch, equations, len(equation.reads) - 1, len(equation.makes))
        case While(num_condition_consts=of_condition, num_body_consts=of_body):
            num_carry = len(equation.makes)
            _check_least(here, of_condition, of_body)
            if of_condition + of_body + num_carry != len(equation.reads):
                raise ValueError(f"{here} has other operands than its parts")
            _check_block(here, equation.condition, equations, of_condition + num_carry, 1)
            _check_block(here, equation.body, equations, of_body + num_carry, num_carry)


def _check_known(place: str, numbers: Sequence[int], known: set[int]) -> None:
    for number in numbers:
        if number not in known:
            raise ValueError(f"{place} reads the value {number}, which no equation before it makes")


def _check_position(place: str, position: int, among: Sized) -> None:
    if not 0 <= position < len(among):
        raise ValueError(f"{place} is {position}, and there are {len(among)}")


def _check_least(place: str, *counts: int) -> None:
    if min(counts) < 0:
        raise ValueError(f"{place} has other operands than its parts")


def _check_counts(place: str, inputs: Sized, outputs: Sized, num_inputs: int, num_results: int) -> None:
    if (len(inputs), len(outputs)) != (num_inputs, num_results):
        raise ValueError(
            f"{place} takes {len(inputs)} values and makes {len(outputs)}, not {num_inputs} and {num_results}"
        )
