"""A step as the compiler's first two passes leave it: flat arguments, and equations and loops in turn.

Grammar::

    TracedStep ::= argument-path* constant* jaxpr       loops are equations in it; marks have no numbers
    CutStep    ::= Argument* constant* (equation* Loop)* equation* Result*
    Loop       ::= index equation* LoopResult*          the equations have marks among them, with numbers

``str()`` prints each level, and ``checks.py`` checks its invariants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from mpmd.compiler.jaxprs.equations import Atom, lookup, substitute
from mpmd.compiler.jaxprs.marks import closed_over
from mpmd.compiler.jaxprs.printing import Names, indented
from mpmd.compiler.jaxprs.source import where
from mpmd.ir.plan import Spec
from mpmd.ir.slices import SliceNumbers
from mpmd.ir.stack import Leaf
from mpmd.language.annotate import Mark, mark_of
from mpmd.language.reduce import treduce_p
from mpmd.schedules import Schedule
from mpmd.util.tree import paths


@dataclasses.dataclass(frozen=True)
class Argument:
    """A leaf of the step's arguments, or a layer range of one, such as ``args[0].params['w'][0:2]``.

    Attributes:
      donated: whether the caller gives it up.
    """

    path: str
    var: Var
    donated: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """A leaf of the step's result, or a layer range of one.

    ``var`` may be an argument, and the variable of several results.
    """

    path: str
    var: Var


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """A result of the loop.

    Attributes:
      value: what the body makes of one microbatch: the addend of a plain sum, or else the new state.
      state: the variable in which the body reads the state before the microbatch; ``None`` for a plain sum.
      initial: the outer value of the state before the first microbatch.
      result: the outer variable of the state after the last microbatch.
      ordered: whether the order of the microbatches may decide the result.
      is_carry: whether the function of a microbatch itself reads the state, and not an operation alone.
    """

    value: Atom
    state: Var | None
    initial: Atom
    result: Var
    ordered: bool
    is_carry: bool = False


@dataclasses.dataclass(frozen=True)
class Loop:
    """A microbatch loop.

    Attributes:
      where: the user's line.
      first_stage: the number of its first stage: of all stages of the loops before.
      decision_index: which of the step's decisions it was traced under: see ``Decisions.of_loops``.
      part: the part of the mesh that runs it; ``None``: the groups of its schedule are the mesh's.
      index: the variable of the microbatch index, an int32 scalar.
      eqns: the body for one microbatch. It reads outer variables directly. The boundary of each mark among
        the equations says which stage ends there.
    """

    where: str
    index: Var
    eqns: tuple[JaxprEqn, ...]
    results: tuple[LoopResult, ...]
    num_microbatches: int
    schedule: Schedule
    first_stage: int = 0
    decision_index: int = 0
    part: str | None = None

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Loop:
        body: Jaxpr = eqn.params["body"]
        outer = closed_over(eqn)
        index, *state_vars = body.invars[len(outer) :]
        states = iter(state_vars)
        results = tuple(
            LoopResult(
                value=lookup(value, outer),
                state=None if is_sum else next(states),
                initial=initial,
                result=result,
                ordered=ordered,
                is_carry=is_carry,
            )
            for value, is_sum, initial, result, ordered, is_carry in zip(
                body.outvars,
                eqn.params["summed"],
                eqn.invars[len(outer) :],
                eqn.outvars,
                eqn.params["ordered"],
                eqn.params["carried"],
                strict=True,
            )
        )
        return cls(
            where=where(eqn),
            index=index,
            eqns=tuple(substitute(inner, outer) for inner in body.eqns),
            results=results,
            num_microbatches=eqn.params["length"],
            schedule=eqn.params["schedule"],
            decision_index=eqn.params["number"],
            part=eqn.params["part"],
        )

    @property
    def stages(self) -> range:
        """The numbers of its stages, on all slices of a microbatch."""
        return self.numbers.all

    @property
    def numbers(self) -> SliceNumbers:
        return SliceNumbers(self.schedule.num_stages, self.schedule.slices, self.first_stage)

    @property
    def ends(self) -> tuple[str, ...]:
        """The layers after which stages end, where ``mpmd.auto_marks`` has chosen them; else empty."""
        boundaries = {mark.boundary for _, mark in self.marks}
        of_layers = [(boundary.stage, end) for boundary in boundaries for end in boundary.ends]
        return tuple(end for _, end in sorted(of_layers))

    @property
    def marks(self) -> list[tuple[JaxprEqn, Mark]]:
        return [(eqn, mark) for eqn in self.eqns if (mark := mark_of(eqn))]

    @property
    def states(self) -> tuple[Var, ...]:
        return tuple(result.state for result in self.results if result.state is not None)


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step as JAX traces it, as a jaxpr of the leaves of its arguments.

    Calls outside of loops are inlined, and values have no shardings in their types.

    Attributes:
      jaxpr: with a ``treduce`` equation for each loop, and marks without the numbers of stages, which may be
        in scans.
      constants: the values of the variables that ``jaxpr`` reads besides its arguments.
      argument_paths: the user's names of the arguments, such as ``args[0].params['w']``.
      donated: for each argument, whether the caller gives it up.
      out_shape: the result as a pytree of ``ShapeDtypeStruct``.
      fed_back_leaves: pairs of an argument's and a result's position that a training loop will connect.
      explicit_specs: the specs of variables whose types said how they are sharded.
      ignored_marks: the marks outside of loops that a result depended on, as text; they are left out.
      open_loops: the decision indices of loops whose number of microbatches the step leaves open.
    """

    jaxpr: Jaxpr
    constants: Mapping[Var, Any]
    argument_paths: tuple[str, ...]
    donated: tuple[bool, ...]
    out_shape: Any
    fed_back_leaves: tuple[tuple[int, int], ...]
    explicit_specs: Mapping[Var, Spec]
    ignored_marks: tuple[str, ...] = ()
    open_loops: frozenset[int] = frozenset()

    @property
    def has_loop(self) -> bool:
        return any(eqn.primitive is treduce_p for eqn in self.jaxpr.eqns)

    def __str__(self) -> str:
        loops = {eqn: Loop.of(eqn) for eqn in self.jaxpr.eqns if eqn.primitive is treduce_p}
        arguments = zip(self.jaxpr.invars, self.argument_paths, strict=True)
        names = _names((*arguments, *((loop.index, "index") for loop in loops.values())), self.constants)
        lines = [*_argument_lines(names, self.jaxpr.invars, self.constants), "step"]
        for eqn in self.jaxpr.eqns:
            lines += indented(_loop_lines(loops[eqn], names) if eqn in loops else [names.equation(eqn)])
        outs = zip(paths(self.out_shape), self.jaxpr.outvars, strict=True)
        next_of = {result: self.argument_paths[argument] for argument, result in self.fed_back_leaves}
        return "\n".join([*lines, "results", *indented(_result_lines(names, outs, next_of))])


@dataclasses.dataclass(frozen=True)
class CutStep:
    """A step over flat arguments, each a value of one group: equations and loops in turn.

    Scans are cut where stages end, and the arrays that they scan are cut into the same layer ranges.
    Equations and loops that no result needs are gone.

    Attributes:
      constants: the values of the variables that equations read besides the arguments.
      loops: in the order in which they are written, which follows their data dependencies.
      outside: the equations before the first loop, between each two loops, and after the last one; of a
        function without a loop, all. The compiler may move them.
      out_shape: the result as a pytree of ``ShapeDtypeStruct``.
      argument_leaves, result_leaves: the leaves that the arguments and results are layer ranges of, in order.
      fed_back_leaves: pairs of an argument leaf's and a result leaf's position that a training loop will
        connect.
      fed_back: pairs of an argument's and a result's position, where both leaves are in the same layer
        ranges.
      explicit_specs: the specs of variables, outside and inside the loop, whose types said how they are
        sharded, as types do along explicit mesh axes. Their types have no sharding any more.
    """

    arguments: tuple[Argument, ...]
    constants: Mapping[Var, Any]
    loops: tuple[Loop, ...]
    outside: tuple[tuple[JaxprEqn, ...], ...]
    results: tuple[Result, ...]
    out_shape: Any
    argument_leaves: tuple[Leaf, ...]
    result_leaves: tuple[Leaf, ...]
    fed_back_leaves: tuple[tuple[int, int], ...]
    fed_back: tuple[tuple[int, int], ...]
    explicit_specs: Mapping[Var, Spec] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        names = self.names()
        lines = self.argument_lines(names)
        for segment, eqns in enumerate(self.outside):
            if segment:
                number = f" {segment - 1}" if len(self.loops) > 1 else ""
                lines += _loop_lines(self.loops[segment - 1], names, number)
            lines += [self.segment_text(segment), *indented(map(names.equation, eqns))]
        return "\n".join([*lines, "results", *indented(self.result_lines(names))])

    @property
    def inputs(self) -> list[Var]:
        """The variables of the arguments, then the variables of the constants."""
        return [*(argument.var for argument in self.arguments), *self.constants]

    def loop_of(self, stage: int) -> int:
        return next(number for number, loop in enumerate(self.loops) if stage in loop.stages)

    def segment_text(self, segment: int) -> str:
        if not self.loops:
            return "without a loop"
        which = "the loop" if len(self.loops) == 1 else "all loops"
        if 0 < segment < len(self.loops):
            return f"between loop {segment - 1} and loop {segment}"
        return f"{'after' if segment else 'before'} {which}"

    def names(self) -> Names:
        arguments = ((argument.var, argument.path) for argument in self.arguments)
        return _names((*arguments, *((loop.index, "index") for loop in self.loops)), self.constants)

    def argument_lines(self, names: Names) -> list[str]:
        return _argument_lines(names, (argument.var for argument in self.arguments), self.constants)

    def result_lines(self, names: Names) -> list[str]:
        results = ((result.path, result.var) for result in self.results)
        next_of = {result: self.arguments[argument].path for argument, result in self.fed_back}
        return _result_lines(names, results, next_of)


def _names(names: Iterable[tuple[Var, str]], constants: Iterable[Var]) -> Names:
    return Names({**dict(names), **{var: f"constant_{i}" for i, var in enumerate(constants)}})


def _argument_lines(names: Names, arguments: Iterable[Var], constants: Collection[Var]) -> list[str]:
    lines = ["arguments", *indented(map(names.typed, arguments))]
    return [*lines, "constants", *indented(map(names.typed, constants))] if constants else lines


def _loop_lines(loop: Loop, names: Names, number: str = "") -> list[str]:
    lines = [f"loop{number} over {loop.num_microbatches} microbatches, {loop.schedule}"]
    for eqn in loop.eqns:
        mark = mark_of(eqn)
        lines.append(f"  {names.equation(eqn)}" + (f"    # {mark.boundary}" if mark else ""))
    for result in loop.results:
        update = "+=" if result.state is None else f"from {names.of(result.state)} to"
        start = f"{names.typed(result.result)} starts as {names.of(result.initial)}"
        lines.append(f"  {start}, {update} {names.of(result.value)}")
    return lines


def _result_lines(names: Names, results: Iterable[tuple[str, Atom]], next_of: Mapping[int, str]) -> list[str]:
    """``next_of`` has, for the positions of results that the next step takes, the paths of its arguments."""
    return [
        f"result{path} = {names.of(atom)}" + (f"    # the next {next_of[i]}" if i in next_of else "")
        for i, (path, atom) in enumerate(results)
    ]
