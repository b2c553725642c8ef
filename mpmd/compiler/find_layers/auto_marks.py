"""Marks the ends of stages in a function without marks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.tree_util import DictKey, SequenceKey

from mpmd.compat import api_boundary
from mpmd.compiler.find_layers.crossing import Crossing
from mpmd.compiler.find_layers.even_stages import even_stages
from mpmd.compiler.find_layers.find_layers import FoundLayer, LayerEnd, find_layers, opened_for_layers
from mpmd.compiler.find_layers.open_function import RematOptions
from mpmd.compiler.find_layers.run_marked import MarkedRun
from mpmd.compiler.jaxprs.equations import contains
from mpmd.compiler.jaxprs.source import where
from mpmd.errors import CompileError
from mpmd.language.annotate import mark_p
from mpmd.language.decisions import current_decisions, is_planned
from mpmd.language.remat import Remat
from mpmd.util.tables import first_few
from mpmd.util.tree import with_leaves
from mpmd.validation import callable_fault, int_fault, raise_faults

Function = TypeVar("Function", bound=Callable)


@api_boundary
def auto_marks(loss_fn: Function, num_stages: int | None = None) -> Function:
    """The function with the ends of stages marked where its layers end.

    Layers are found in the function as it is traced: iterations of scans over layers, blocks that repeat,
    and parts of about equal work of the rest, such as an embedding or a head. Stages are whole layers::

        grads = jax.grad(mpmd.auto_marks(loss_fn, num_stages=4))(params, x, y)

    computes the numbers of ``jax.grad(loss_fn)``, in a pipeline of four stages. Differentiation,
    ``jax.jit``, ``jax.vmap`` and ``jax.checkpoint`` may be inside or outside of ``auto_marks``.

    ``mpmd.value_and_grad`` does this for the stages of its schedule. ``step.report()`` shows where they
    end.

    Under ``mpmd.plan`` the plan says how many layers each stage has, instead of ``num_stages``, and which
    layers are under ``jax.checkpoint``. A function that has marks of its own is left unchanged, and so is a
    function for which neither the plan nor ``num_stages`` asks for stages or checkpoints.

    Args:
      loss_fn: from pytrees to pytrees. Arrays among its arguments are traced; other leaves, such as Python
        numbers, stay as they are.
      num_stages: the number of stages into which its layers are divided, with about equal work.

    Raises: ``TypeError`` if ``loss_fn`` is no function, or ``num_stages`` no whole number, and ``ValueError``
      if that is not positive;
      when the result is called, ``ValueError`` if the function has fewer layers than stages are asked for,
      and ``TypeError`` if it changes an object among its arguments in place, such as a module's statistics.
    """
    raise_faults(
        callable_fault("loss_fn", loss_fn),
        int_fault("num_stages", num_stages, optional=True),
        title="auto_marks: ",
    )

    @functools.wraps(loss_fn)
    @api_boundary
    def marked(*args: Any, **kwargs: Any) -> Any:
        decisions = current_decisions()
        again = any(policy is not Remat.NONE for policy in decisions.remat)
        if num_stages is None and decisions.layers_per_stage is None and not again:
            return loss_fn(*args, **kwargs)
        traced = _Traced(loss_fn, args, kwargs)
        if contains(traced.closed.jaxpr, mark_p):
            # Objects that the function changes have their new values only where it is called.
            if traced.changed:
                return loss_fn(*args, **kwargs)
            return traced.result(jaxpr_as_fun(traced.closed)(*traced.arrays))
        traced.check_unchanged()
        opened = opened_for_layers(traced.closed)
        crossing = Crossing(opened.jaxpr)
        count = sum(decisions.layers_per_stage or ()) or decisions.num_layers
        layers = find_layers(opened.jaxpr, crossing, count)
        named_layers = _NamedLayers(_name(loss_fn), layers, _last_lines(layers, opened.jaxpr))
        counts = named_layers.layers_per_stage(decisions.layers_per_stage, num_stages)
        last_layers = list(itertools.accumulate(counts))[:-1]
        ends = {layers[last - 1].end: named_layers.text(last) for last in last_layers}
        by_layer = again or (is_planned() and decisions.remat)
        remat = _remat_of_layers(layers, counts, decisions.remat) if by_layer else {}
        return traced.result(MarkedRun(opened, crossing, traced.arrays, ends, remat).results())

    return marked  # type: ignore[return-value]


def _remat_of_layers(
    layers: Sequence[FoundLayer], counts: Sequence[int], policies: tuple[Remat, ...]
) -> dict[LayerEnd, RematOptions | None]:
    """The options of each layer, by its end; the policies are of stages, or one is of all layers."""
    if len(policies) == 1:
        policies *= len(counts)
    each = (policy for policy, count in zip(policies, counts, strict=True) for _ in range(count))
    return {layer.end: RematOptions.by_policy(policy) for layer, policy in zip(layers, each, strict=True)}


class _Traced:
    """A call of a function, as a jaxpr of the arrays among its arguments.

    Attributes:
      closed: the jaxpr.
      arrays: its inputs.
      changed: the paths of leaves of objects among the arguments that the function changes.
    """

    def __init__(self, fun: Callable, args: tuple, kwargs: dict[str, Any]):
        self._fun = fun
        leaves, treedef = jax.tree.flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        self.arrays = [leaves[i] for i in at]

        def of_arrays(*arrays: jax.Array) -> list[jax.Array]:
            call = jax.tree.unflatten(treedef, with_leaves(leaves, at, arrays))
            before = jax.tree_util.tree_leaves_with_path(call)
            args, kwargs = call
            self._out, self._outdef = jax.tree.flatten(fun(*args, **kwargs))
            self.changed = _changed_in_place(before, jax.tree_util.tree_leaves_with_path(call))
            self._array_positions = [i for i, leaf in enumerate(self._out) if isinstance(leaf, jax.Array)]
            return [self._out[i] for i in self._array_positions]

        self.closed: ClosedJaxpr = jax.make_jaxpr(of_arrays)(*self.arrays)
        self._out = [None if i in set(self._array_positions) else leaf for i, leaf in enumerate(self._out)]

    def check_unchanged(self) -> None:
        if self.changed:
            raise TypeError(
                f"{_name(self._fun)} changes {self.changed[0]} of its arguments in place, which auto_marks "
                "does not see: let it take arrays and return the new ones, as by nnx.split and nnx.merge"
            )

    def result(self, values: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._outdef, with_leaves(self._out, self._array_positions, values))


def _changed_in_place(before: Sequence[tuple], after: Sequence[tuple]) -> list[str]:
    """Returns the paths of leaves that a function has changed in copies of the objects among its arguments.

    Dicts and lists may be changed: ``jax.grad`` passes copies of dicts and lists, too.
    """
    known = dict(before)
    return [
        jax.tree_util.keystr(path)
        for path, leaf in after
        if any(not isinstance(key, DictKey | SequenceKey) for key in path) and known.get(path) is not leaf
    ]


def _name(fun: Callable) -> str:
    return getattr(fun, "__name__", type(fun).__name__)


def _last_lines(layers: Sequence[FoundLayer], jaxpr: Jaxpr) -> list[str]:
    last = [layer.end.equation - (not layer.end.iterations) for layer in layers]
    return [where(jaxpr.eqns[i]) if jaxpr.eqns else "" for i in last]


@dataclasses.dataclass(frozen=True)
class _NamedLayers:
    name: str
    layers: Sequence[FoundLayer]
    lines: Sequence[str]

    def layers_per_stage(self, decided: tuple[int, ...] | None, num_stages: int | None) -> tuple[int, ...]:
        if decided is not None:
            if decided and (sum(decided) != len(self.layers) or min(decided) < 1):
                raise CompileError(
                    f"layers_per_stage={decided} divides {sum(decided)} layers, of which each stage has one "
                    f"at least, but auto_marks found {self}"
                )
            return decided or (1,) * len(self.layers)
        num_stages = num_stages or 1
        if len(self.layers) < num_stages:
            raise ValueError(
                f"num_stages={num_stages} needs as many layers at least, but auto_marks found {self}. Ask "
                "for fewer stages, or write mark_stage_end where they end. Layers are blocks that repeat, "
                "iterations of a scan over layers, and products of which one needs the other"
            )
        work, leaving = zip(*((layer.work, layer.leaving) for layer in self.layers), strict=True)
        return even_stages(work, leaving, num_stages)

    def text(self, number: int) -> str:
        return f"layer {number} of {len(self.layers)} at {self.lines[number - 1]}"

    def __str__(self) -> str:
        if len(self.layers) == 1:
            return f"nothing to cut in {self.name}"
        return f"{len(self.layers)} in {self.name}, which end at {first_few(self.lines, 5)}"
