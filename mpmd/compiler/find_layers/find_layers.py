"""Finds the layers of a function: the parts that no stage divides.

Layers are iterations of scans over layers, blocks that repeat, and, of the rest, parts of about equal work
that pass few bytes on. Alpa groups all equations by a dynamic programme (Zheng et al. 2022, arXiv
2201.12023, section 5.2); here only the rest is grouped in this way, so that repeated blocks stay whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Container, Iterator, Sequence

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from mpmd.compiler.find_layers.crossing import Crossing
from mpmd.compiler.find_layers.open_function import OpenFunction, open_function
from mpmd.compiler.find_layers.pieces import best_pieces
from mpmd.compiler.find_layers.repeats import Repeat, find_runs
from mpmd.compiler.jaxprs.equations import aval_of, avals_of, is_among, is_remat, operands, subjaxprs
from mpmd.compiler.jaxprs.printing import type_text
from mpmd.compiler.jaxprs.scans import Scan
from mpmd.compiler.jaxprs.work import PRODUCTS, WorkOf, has_product, nbytes

_MOST_PARTS = 32
"""The most parts of a function in which nothing repeats."""

_SMALL = 0.2
"""A part with less than this share of a typical layer's work is merged with a neighbour. So is a part without
a product, such as a loss, unless it has as much work as a typical layer."""

_BLOCKS = 0.7
"""The least share of a function's work in repeated blocks or scans over layers for which the function is
divided into these."""


@dataclasses.dataclass(frozen=True, order=True)
class LayerEnd:
    """The end of a layer: before an equation, and, of a scan over layers, after some iterations."""

    equation: int
    iterations: int = 0


@dataclasses.dataclass(frozen=True)
class FoundLayer:
    """A part of a function.

    Attributes:
      start, end: the end of the layer before, and its own.
      work: operations, where a byte of memory traffic counts as ``OPERATIONS_PER_BYTE``.
      leaving: bytes that it and the layers before it hand over at its end; 0 of the last one.
    """

    start: LayerEnd
    end: LayerEnd
    work: float
    leaving: int


def find_layers(
    jaxpr: Jaxpr, crossing: Crossing | None = None, count: int | None = None
) -> tuple[FoundLayer, ...]:
    """Returns the layers of a function in order, or a single layer for a function that cannot be cut.

    Args:
      jaxpr: a jaxpr without calls that hide layers, as ``open_function`` returns it.
      crossing: the ``Crossing`` of this jaxpr, if the caller has computed it.
      count: the wanted number of layers, used if the function has as many: the user's number, or the number
        that was found for a batch of another size, in which other parts may be small.
    """
    return _Finder(jaxpr, crossing or Crossing(jaxpr)).layers(count)


def opened_for_layers(function: ClosedJaxpr) -> OpenFunction:
    """A function without the calls that hide layers.

    A function under ``jit`` hides some if it has more than a small share of the work, since it may be
    anything; one under ``jax.checkpoint`` if it has half of the work, or consists of blocks that repeat:
    otherwise it is taken for one block of the model. What stays a call is differentiated once, however often
    it is called.
    """
    work_of = WorkOf()
    total = work_of.jaxpr(function.jaxpr)

    def hides_layers(eqn: JaxprEqn) -> bool:
        work = work_of.equation(eqn)
        if is_remat(eqn):
            return work > total / 2 or _consists_of_blocks(eqn.params["jaxpr"])
        return work > total / _MOST_PARTS / 2

    return open_function(function, hides_layers)


def _consists_of_blocks(jaxpr: Jaxpr) -> bool:
    opened = open_function(ClosedJaxpr(jaxpr, ()), lambda eqn: True).jaxpr
    finder = _Finder(opened, Crossing(opened))
    blocks = (*finder.scan_ranges, *finder.run_ranges)
    covered = sum(finder.work_between(start, stop) for start, stop in blocks)
    return covered > _BLOCKS * finder.work_between(0, len(opened.eqns))


class _Finder:
    def __init__(self, jaxpr: Jaxpr, crossing: Crossing):
        self._crossing = crossing
        self._eqns = eqns = jaxpr.eqns
        work_of = WorkOf()
        self._work = [work_of.equation(eqn) for eqn in eqns]
        self._before = [0.0, *itertools.accumulate(self._work)]
        computed = {var for eqn in eqns for var in eqn.outvars if var not in crossing.from_inputs}
        self._scans = [i for i, eqn in enumerate(eqns) if _is_layer_scan(eqn, computed)]
        self._runs = list(self._find_runs())

    @property
    def scan_ranges(self) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in self._scans]

    @property
    def run_ranges(self) -> list[tuple[int, int]]:
        return [(run.start, run.stop) for run in self._runs]

    def work_between(self, start: int, stop: int) -> float:
        return self._before[stop] - self._before[start]

    def layers(self, count: int | None) -> tuple[FoundLayer, ...]:
        ends = sorted({*self._block_ends(), *self._piece_ends()})
        ends = [LayerEnd(0), *(end for end in ends if self._leaving(end)), LayerEnd(len(self._eqns))]
        layers = [self._layer(start, end) for start, end in itertools.pairwise(ends)]
        usual = self._typical_work()
        return tuple(
            _merged(layers, lambda layer: usual * (_SMALL if self._has_product(layer) else 1.0), count)
        )

    def _find_runs(self) -> Iterator[Repeat]:
        tokens = _tokens(self._eqns)
        for start, stop in _gaps(self.scan_ranges, len(self._eqns)):
            runs = find_runs(
                tokens[start:stop],
                self._work[start:stop],
                self._crossing.bytes_between(start, stop),
            )
            yield from (dataclasses.replace(run, start=start + run.start) for run in runs)

    def _block_ends(self) -> Iterator[LayerEnd]:
        for i in self._scans:
            yield from (LayerEnd(i, done) for done in range(self._eqns[i].params["length"]))
            yield LayerEnd(i + 1)
        for run in self._runs:
            yield from map(LayerEnd, run.ends)

    def _piece_ends(self) -> Iterator[LayerEnd]:
        blocks = sorted((*self.scan_ranges, *self.run_ranges))
        for start, stop in _gaps(blocks, len(self._eqns)):
            for position in best_pieces(
                self._work[start:stop],
                self._crossing.bytes_between(start, stop),
                self._typical_work(),
                self._usual_leaving(),
            ):
                yield LayerEnd(start + position)

    def _typical_work(self) -> float:
        """The work of the layer in the middle of the work of all blocks; without any, of parts."""
        of_blocks = [(self._work[i] / self._eqns[i].params["length"], self._work[i]) for i in self._scans]
        for run in self._runs:
            work = self.work_between(run.start, run.stop)
            of_blocks.append((work / run.count, work))
        if not of_blocks:
            total = self._before[-1]
            large = sum(work > total / _MOST_PARTS / 2 for work in self._work)
            return total / max(min(large, _MOST_PARTS), 1)
        of_blocks.sort()
        half = sum(total for _, total in of_blocks) / 2
        passed = itertools.accumulate(total for _, total in of_blocks)
        return next(work for (work, _), total in zip(of_blocks, passed, strict=True) if total >= half)

    def _usual_leaving(self) -> float | None:
        leaving = [self._leaving(end) for end in self._block_ends()]
        return statistics.median(leaving) if leaving else None

    def _has_product(self, layer: FoundLayer) -> bool:
        stop = layer.end.equation + bool(layer.end.iterations)
        return any(map(has_product, self._eqns[layer.start.equation : stop]))

    def _leaving(self, end: LayerEnd) -> int:
        if not end.iterations:
            return self._crossing.bytes_at(end.equation) or 0
        eqn = self._eqns[end.equation]
        return sum(map(nbytes, eqn.invars[Scan.of(eqn).carry]))

    def _layer(self, start: LayerEnd, end: LayerEnd) -> FoundLayer:
        leaving = self._leaving(end) if end.equation < len(self._eqns) else 0
        return FoundLayer(start, end, self._work_before(end) - self._work_before(start), leaving)

    def _work_before(self, end: LayerEnd) -> float:
        work = self._before[end.equation]
        if end.iterations:
            share = end.iterations / self._eqns[end.equation].params["length"]
            work += share * self._work[end.equation]
        return work


def _gaps(ranges: Sequence[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    edges = [0, *itertools.chain.from_iterable(ranges), length]
    yield from ((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)


def _merged(
    layers: Sequence[FoundLayer], least: Callable[[FoundLayer], float], count: int | None
) -> list[FoundLayer]:
    """Layers of sufficient work: a smaller one is merged with the neighbour with which it shares more.

    Args:
      least: the least work of a layer.
      count: the number of layers to which they are merged instead; ``None``: as ``least`` says.
    """
    merged = list(layers)
    while len(merged) > (count or 1):
        shares = [layer.work / (least(layer) or 1.0) for layer in merged]
        i = shares.index(min(shares))
        if shares[i] >= 1 and count is None:
            break
        to_next = merged[i].leaving if i + 1 < len(merged) else -1
        to_previous = merged[i - 1].leaving if i else -1
        first = i if to_next >= to_previous else i - 1
        left, right = merged[first : first + 2]
        merged[first : first + 2] = [FoundLayer(left.start, right.end, left.work + right.work, right.leaving)]
    return merged


def _tokens(eqns: Sequence[JaxprEqn]) -> list[int]:
    """A number for each equation: equal ones do the same with values of the same shapes and dtypes."""
    numbers: dict[tuple, int] = {}
    of_jaxprs: dict[int, int] = {}

    def of_jaxpr(jaxpr: Jaxpr) -> int:
        if id(jaxpr) not in of_jaxprs:
            key = ("jaxpr", *map(of_equation, jaxpr.eqns))
            of_jaxprs[id(jaxpr)] = numbers.setdefault(key, len(numbers))
        return of_jaxprs[id(jaxpr)]

    def of_equation(eqn: JaxprEqn) -> int:
        read = ((type_text(aval_of(atom)), isinstance(atom, Literal)) for atom in eqn.invars)
        results = map(type_text, avals_of(eqn.outvars))
        key = (eqn.primitive.name, *read, *results, *map(of_jaxpr, subjaxprs(eqn)))
        return numbers.setdefault(key, len(numbers))

    return [of_equation(eqn) for eqn in eqns]


def _is_layer_scan(eqn: JaxprEqn, computed: Container[Var]) -> bool:
    """Whether an equation is a scan whose iterations are layers.

    They are if carried values are multiplied by weights that are scanned over. A scan over time or over
    chunks has its weights among its constants, or scans over computed values.

    Args:
      computed: the values that are neither inputs nor derived from a single input.
    """
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
        return False
    scan = Scan.of(eqn)
    weights = {x for x, atom in scan.operands(scan.xs).items() if not is_among(atom, computed)}
    return _multiplies(scan.body, set(scan.body.invars[scan.carry]), weights)


def _multiplies(jaxpr: Jaxpr, carried: set[Var], weights: set[Var]) -> bool:
    """Whether a value that depends on ``carried`` is multiplied by a value of ``weights`` alone."""
    for eqn in jaxpr.eqns:
        read = set(operands(eqn))
        of_carried, of_weights = not read.isdisjoint(carried), not read.isdisjoint(weights)
        if of_carried and of_weights and eqn.primitive.name in PRODUCTS:
            return True
        for inner in subjaxprs(eqn):
            if len(inner.invars) == len(eqn.invars):
                pairs = list(zip(inner.invars, eqn.invars, strict=True))
                within = ({a for a, b in pairs if is_among(b, those)} for those in (carried, weights))
                if _multiplies(inner, *within):
                    return True
        if of_carried:
            carried.update(eqn.outvars)
        elif of_weights:
            weights.update(eqn.outvars)
    return False
