"""Cuts a step into the stages' share of its layers, and numbers the stages, in phases."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence, Set

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from mpmd.compiler.cut_layers.cut import CutJaxpr, cut_stacks
from mpmd.compiler.cut_layers.host_callbacks import with_host_callbacks
from mpmd.compiler.cut_layers.number_marks import number_live_marks, number_marks
from mpmd.compiler.jaxprs.control_flow import live_eqns
from mpmd.compiler.jaxprs.equations import Atom, aval_of, free_variables, variables
from mpmd.compiler.jaxprs.source import where
from mpmd.compiler.jaxprs.traced import copy_of
from mpmd.compiler.steps import Argument, CutStep, Loop, Result, TracedStep
from mpmd.errors import CompileError
from mpmd.ir.stack import Leaf, Stack, per_layer_range
from mpmd.language.reduce import treduce_p
from mpmd.util.tree import paths


def cut_layers(
    traced: TracedStep,
    argument_stacks: Sequence[Stack | None] = (),
    result_stacks: Sequence[Stack | None] = (),
) -> CutStep:
    """Cuts scans over layers where stages end, and the arrays of the layers into parts.

    Args:
      argument_stacks, result_stacks: for a function without a loop, the division of each leaf of
        the arguments and of the result into layer ranges; ``None`` for a whole leaf, empty if all are whole.

    Raises: ``CompileError`` for loops without a schedule; for marks that do not fit their scans, or do not
      make the stages of schedules; for marked loops that take rows by a counter.
    Warns: ``PerformanceWarning`` for equations that put parts together; ``SharedWeightsWarning`` for marks in
      scans over data.
    """
    _check_schedules(traced.jaxpr)
    # 1. Scans are cut at their marks, and stacked arrays into parts.
    stacks = () if traced.has_loop else (argument_stacks, result_stacks)
    cut = cut_stacks(traced.jaxpr, traced.constants, traced.fed_back_leaves, *stacks)
    # 2. Callbacks that give nothing back are what the driver calls, each layer range of a scan its own.
    jaxpr = with_host_callbacks(cut.jaxpr)
    # 3. Equations and loops come in turn; results that are no value of the step yet become copies.
    outside, loops = _segments(jaxpr)
    copies, results = _result_vars(jaxpr, cut.constants)
    # 4. Marks get the numbers of the stages that they end.
    numbered = number_marks(loops)
    # 5. What no result needs goes.
    live, live_loops = _without_dead_code([*outside[:-1], [*outside[-1], *copies]], numbered, results)
    # 6. The marks that are left are numbered through all loops.
    staged = number_live_marks(live_loops, numbered)
    return _cut_step(traced, cut, live, staged, results)


def _check_schedules(jaxpr: Jaxpr) -> None:
    if faults := [
        f"the treduce at {where(eqn)} has no schedule: give schedule=..., such as "
        "mpmd.Std1F1B(num_stages=4), or let mpmd.plan choose"
        for eqn in jaxpr.eqns
        if eqn.primitive is treduce_p and eqn.params["schedule"] is None
    ]:
        raise CompileError(list(dict.fromkeys(faults)))


def _segments(jaxpr: Jaxpr) -> tuple[list[list[JaxprEqn]], list[Loop]]:
    outside: list[list[JaxprEqn]] = [[]]
    loops: list[Loop] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is treduce_p:
            loops.append(Loop.of(eqn))
            outside.append([])
        else:
            outside[-1].append(eqn)
    return outside, loops


def _result_vars(jaxpr: Jaxpr, constants: Collection[Var]) -> tuple[list[JaxprEqn], list[Var]]:
    eqns: list[JaxprEqn] = []
    results: list[Var] = []
    for atom in jaxpr.outvars:
        if isinstance(atom, Literal) or atom in constants:
            eqns.append(copy_of(atom))
            (atom,) = eqns[-1].outvars
        results.append(atom)
    return eqns, results


def _cut_step(
    traced: TracedStep,
    cut: CutJaxpr,
    outside: tuple[tuple[JaxprEqn, ...], ...],
    loops: tuple[Loop, ...],
    results: Sequence[Var],
) -> CutStep:
    argument_leaves = tuple(map(_leaf, traced.argument_paths, traced.jaxpr.invars, cut.argument_stacks))
    result_leaves = tuple(map(_leaf, paths(traced.out_shape), traced.jaxpr.outvars, cut.result_stacks))
    donated = per_layer_range(argument_leaves, traced.donated)
    read, specs = _variables_read(outside, loops), traced.explicit_specs
    return CutStep(
        arguments=tuple(map(Argument, _names(argument_leaves), cut.jaxpr.invars, donated)),
        constants={var: value for var, value in cut.constants.items() if var in read},
        loops=loops,
        outside=outside,
        results=tuple(map(Result, _names(result_leaves), results)),
        out_shape=traced.out_shape,
        argument_leaves=argument_leaves,
        result_leaves=result_leaves,
        fed_back_leaves=traced.fed_back_leaves,
        fed_back=tuple(_fed_back_ranges(traced.fed_back_leaves, argument_leaves, result_leaves)),
        explicit_specs={**specs, **{new: specs[var] for new, var in cut.origin.items() if var in specs}},
    )


def _leaf(path: str, atom: Atom, stack: Stack | None) -> Leaf:
    aval = aval_of(atom)
    return Leaf(path, tuple(aval.shape), aval.dtype, aval.weak_type, stack)


def _names(leaves: Sequence[Leaf]) -> Iterator[str]:
    return (name for leaf in leaves for name in leaf.names)


def _variables_read(outside: Sequence[Sequence[JaxprEqn]], loops: Sequence[Loop]) -> set[Var]:
    atoms = [atom for eqn in itertools.chain(*outside, *(loop.eqns for loop in loops)) for atom in eqn.invars]
    atoms += [atom for loop in loops for result in loop.results for atom in (result.initial, result.value)]
    return set(variables(atoms))


def _fed_back_ranges(
    fed_back_leaves: Sequence[tuple[int, int]], arguments: Sequence[Leaf], results: Sequence[Leaf]
) -> Iterator[tuple[int, int]]:
    first_argument, first_result = (
        [0, *itertools.accumulate(len(leaf.names) for leaf in leaves)] for leaves in (arguments, results)
    )
    for i, j in fed_back_leaves:
        if arguments[i].stack == results[j].stack:
            yield from ((first_argument[i] + p, first_result[j] + p) for p in range(len(arguments[i].names)))


def _without_dead_code(
    outside: Sequence[Sequence[JaxprEqn]], loops: Sequence[Loop], results: Sequence[Var]
) -> tuple[tuple[tuple[JaxprEqn, ...], ...], tuple[Loop, ...]]:
    """The loops, and the equations before, between and after them, that the results need.

    Raises: ``CompileError`` when the results need none of the loops.
    """
    needed: set[Var] = set(results)
    live = [live_eqns(outside[-1], needed)]
    kept: list[Loop] = []
    for loop, eqns in zip(reversed(loops), reversed(outside[:-1]), strict=True):
        needed.update(free_variables(live[0]))
        if (alive := _live_loop(loop, needed)) is None:
            live[0] = (*live_eqns(eqns, needed), *live[0])
            continue
        kept.insert(0, alive)
        needed.update(free_variables(alive.eqns))
        needed.update(variables(atom for r in alive.results for atom in (r.value, r.initial)))
        live.insert(0, live_eqns(eqns, needed))
    if loops and not kept:
        at = ", ".join(loop.where for loop in loops)
        raise CompileError(f"no result of the step depends on its treduce, at {at}")
    return tuple(live), tuple(kept)


def _live_loop(loop: Loop, needed: Set[Var]) -> Loop | None:
    kept = tuple(result for result in loop.results if result.result in needed)
    while True:  # until all states that callbacks read are kept
        body = live_eqns(loop.eqns, [result.value for result in kept])
        read_in_loop = {*free_variables(body), *variables(result.value for result in kept)}
        more = tuple(r for r in loop.results if r in kept or r.state in read_in_loop)
        if more == kept:
            break
        kept = more
    if not kept and not any(eqn.effects for eqn in body):
        return None
    return dataclasses.replace(loop, eqns=body, results=kept)
