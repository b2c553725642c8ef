"""Gradients of a whole batch, computed microbatch by microbatch: ``value_and_grad`` and ``grad``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpmd.compat import api_boundary
from mpmd.language.auxiliary import AuxRules, weighted, with_aux
from mpmd.language.captured import captured_named, nothing_to_cut
from mpmd.language.decisions import marked_as_decided
from mpmd.language.operations import operation_faults
from mpmd.language.pieces import cut_rows, list_explained, number_of_microbatches
from mpmd.language.reduce import Add, Mean, treduce
from mpmd.schedules import Schedule
from mpmd.schedules.base import schedule_fault
from mpmd.util.tables import first_few
from mpmd.util.tree import with_leaves
from mpmd.validation import bool_fault, callable_fault, int_fault, positions_faults, raise_faults, shown

Reduction = Literal["mean", "sum"] | Callable[..., Any]


@api_boundary
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    num_microbatches: int | None = None,
    schedule: Schedule | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    reduction: Reduction = "mean",
    aux_reduction: Any = None,
) -> Callable[..., Any]:
    """``jax.value_and_grad`` of a batch that is cut into microbatches, pipelined by ``schedule``.

    A train step that is written for one batch needs this one word changed::

        loss, grads = mpmd.value_and_grad(loss_fn, num_microbatches=8, schedule=mpmd.Std1F1B(4))(params, x, y)

    For a loss that is a mean over the rows of ``x`` and ``y``, it means::

        def of_microbatch(microbatch):
            return jax.value_and_grad(loss_fn)(params, *microbatch)

        xs, ys = mpmd.microbatches((x, y), 8)
        loss, grads = mpmd.treduce(of_microbatch, (xs, ys), schedule, operation=mpmd.Mean)

    The arrays of the batch are cut along their first axis, the rows. Its scalars, such as a single random
    key, are passed to every microbatch as they are: with one key all microbatches draw the same numbers; for
    different numbers, pass a key for each row. Arguments outside of the batch, and arguments that are passed
    by name, go to every microbatch, too.

    Args:
      fun: a function as for ``jax.value_and_grad``: it returns a scalar, or a pair of a scalar and auxiliary
        output. Its marks end stages. A function without marks is put under ``mpmd.auto_marks``: it is cut
        between layers into the stages that ``mpmd.plan`` chooses, or into as many as the schedule has.
        ``step.report()`` shows where.
      argnums: the positions of the arguments to differentiate with respect to.
      has_aux: whether ``fun`` returns auxiliary output.
      num_microbatches: the number of microbatches, by which the number of rows divides. ``None``: the number
        that a plan decides, or else 1.
      schedule: as of ``treduce``.
      batch_argnums: the positions of the arguments that are cut. ``None``: all but ``argnums``.
      reduction: how the values of microbatches make the value of the batch: ``"mean"`` or ``"sum"``; or, for
        a mean over something else than rows, such as tokens that are not padding, a function that takes the
        arguments of ``fun`` for one microbatch and returns its weight, a scalar. The value is then
        ``sum(w[i] * value[i]) / sum(w)``. A microbatch of weight zero adds nothing, not even a NaN; if all
        weights are zero, all count alike.
      aux_reduction: how auxiliary output is combined: an ``Op`` of ``treduce``, or a pytree prefix of the
        output with an ``Op`` for each subtree. ``None``, for a subtree or for the whole output, gives the
        auxiliary output of the whole batch: a leaf whose shape grows with the rows is concatenated along the
        rows; any other leaf has to be of floats and is reduced as the value is. For leaves with axes, ``fun``
        is traced once more, for the shapes of the whole batch.

    Returns: a function of the arguments of ``fun`` with the results of ``jax.value_and_grad``.
    Raises: ``TypeError`` or ``ValueError`` for wrong arguments. The returned function raises the errors of
      ``jax.value_and_grad`` and of ``treduce``; ``ValueError`` for arguments that are not there, that are
      both differentiated and cut, or that cannot be cut; and ``TypeError`` for auxiliary output or weights
      that cannot be combined.
    """
    raise_faults(
        callable_fault("fun", fun),
        *positions_faults("argnums", argnums),
        bool_fault("has_aux", has_aux),
        int_fault("num_microbatches", num_microbatches, optional=True),
        schedule_fault("schedule", schedule, optional=True),
        *([] if batch_argnums is None else positions_faults("batch_argnums", batch_argnums)),
        _reduction_fault(reduction),
        *operation_faults("aux_reduction", aux_reduction),
    )
    marked = marked_as_decided(with_aux(fun, has_aux), schedule)
    differentiate = jax.value_and_grad(marked, argnums, has_aux=True)
    whole = Add if reduction == "sum" else Mean
    aux_operations = aux_reduction if has_aux else None

    def of_microbatches(batch: _Batch, kwargs: dict[str, Any]) -> Any:
        weights = batch.relative_weights(reduction, kwargs) if callable(reduction) else None
        has_single_rows = any(leaf.shape[1] == 1 for leaf in jax.tree.leaves(batch.microbatches))
        rules = AuxRules(
            batch.size, lambda: fun(*batch.whole, **kwargs)[1], has_single_rows, aux_operations, whole
        )

        def of_microbatch(microbatch: Any) -> Any:
            leaves, weight = microbatch
            (value, aux), grads = differentiate(*batch.arguments(leaves), **kwargs)
            rules.find(aux)
            return (*weighted((value, grads), weight), rules.weighted(aux, weight))

        xs, operation = (batch.microbatches, weights), (whole, whole, rules.operations)
        value, grads, aux = treduce(of_microbatch, xs, schedule, operation=operation)
        return ((value, rules.finished(aux)) if has_aux else value), grads

    @api_boundary
    @functools.wraps(fun)
    def of_batch(*args: Any, **kwargs: Any) -> Any:
        cut_arguments = _batch_positions(len(args), argnums, batch_argnums)
        hint = "" if batch_argnums is not None else "; say with batch_argnums which arguments are the batch"
        with list_explained({f"args[{i}]": args[i] for i in sorted(cut_arguments)}):
            batch = _Batch.of(fun, args, kwargs, cut_arguments, num_microbatches, hint)
            if batch.size == 1:
                return of_microbatches(batch, kwargs)
            with captured_named(fun, args, kwargs, batch.rows):
                return of_microbatches(batch, kwargs)

    return of_batch


@api_boundary
def grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """``jax.grad`` of a batch that is cut into microbatches: ``value_and_grad`` without the value.

    Args, errors: as for ``value_and_grad``.
    Returns: a function that returns the gradients; with ``has_aux``, these and the auxiliary output.
    """
    differentiate = value_and_grad(fun, argnums, has_aux, **options)

    @api_boundary
    @functools.wraps(fun)
    def of_batch(*args: Any, **kwargs: Any) -> Any:
        value, grads = differentiate(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return of_batch


def _reduction_fault(reduction: Any) -> ValueError | None:
    if callable(reduction) or (isinstance(reduction, str) and reduction in ("mean", "sum")):
        return None
    reductions = 'reduction must be "mean", "sum", or a function that weighs a microbatch'
    return ValueError(f"{reductions}, not {shown(reduction)}")


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The arguments of one call.

    Attributes:
      leaves: of all positional arguments.
      cut: the positions of the leaves that are cut.
      microbatches: these leaves with a first axis that counts microbatches.
      size: the number of microbatches.
    """

    leaves: tuple[Any, ...]
    treedef: Any
    cut: tuple[int, ...]
    microbatches: tuple[Any, ...]
    size: int

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        cut_arguments: frozenset[int],
        num_microbatches: int | None,
        hint: str,
    ) -> _Batch:
        size = number_of_microbatches("num_microbatches", num_microbatches)
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(args)
        named = {
            i: (f"args{jax.tree_util.keystr(path)}", leaf)
            for i, (path, leaf) in enumerate(with_paths)
            if path[0].idx in cut_arguments and getattr(leaf, "shape", None)
        }
        if not named:
            among = ", ".join(f"args[{i}]" for i in sorted(cut_arguments))
            raise nothing_to_cut(fun, args, kwargs, among or "what is passed")
        with captured_named(fun, args, kwargs):
            microbatches = cut_rows(list(named.values()), size, hint, is_open=num_microbatches is None)
        return cls(tuple(leaf for _, leaf in with_paths), treedef, tuple(named), tuple(microbatches), size)

    def arguments(self, microbatch: Sequence[Any]) -> tuple:
        """Returns the arguments for one microbatch; leaves that are not cut are the same objects in all."""
        return jax.tree.unflatten(self.treedef, with_leaves(self.leaves, self.cut, microbatch))

    @property
    def rows(self) -> int:
        return self.size * self.microbatches[0].shape[1]

    @property
    def whole(self) -> tuple:
        return jax.tree.unflatten(self.treedef, self.leaves)

    def relative_weights(self, weight: Callable[..., Any], kwargs: dict[str, Any]) -> jax.Array:
        """The weight of each microbatch, relative to the mean of the weights: floats, ``(microbatches,)``.

        The mean of values times these weights is the weighted mean. Relative weights are near 1, so that
        gradients in half precision keep their range, and known before the loop, so that each gradient is
        scaled on the group that makes it.
        """

        def of_microbatch(microbatch: Sequence[Any]) -> jax.Array:
            weighed = weight(*self.arguments(microbatch), **kwargs)
            if jnp.shape(weighed) or jnp.iscomplexobj(weighed):
                raise TypeError(
                    "reduction must return a real scalar, how much a microbatch counts, not "
                    f"{jnp.result_type(weighed)}{list(jnp.shape(weighed))}"
                )
            return jnp.asarray(weighed, float)

        weights = jax.vmap(of_microbatch)(self.microbatches)
        mean = jnp.mean(weights)
        return jnp.where(mean == 0, jnp.ones_like(weights), weights / jnp.where(mean == 0, 1, mean))


def _batch_positions(count: int, argnums: Any, batch_argnums: Any) -> frozenset[int]:
    faults: list[str] = []

    def positions(argnums: Any, name: str) -> frozenset[int]:
        listed = (argnums,) if hasattr(argnums, "__index__") else tuple(argnums)
        if missing := [i for i in listed if not -count <= i < count]:
            faults.append(f"{name} {first_few(map(str, missing), 5)} of {count} positional arguments")
        return frozenset(i % count for i in listed if -count <= i < count)

    differentiated = positions(argnums, "argnums")
    if batch_argnums is None:
        cut = frozenset(range(count)) - differentiated
    else:
        cut = positions(batch_argnums, "batch_argnums")
    if both := sorted(differentiated & cut):
        faults.append(
            f"args[{both[0]}] is differentiated (argnums) and cut into microbatches (batch_argnums): call "
            "mpmd.treduce, with mpmd.Concat for the gradient of each microbatch's rows"
        )
    if faults:
        raise ValueError("; ".join(faults))
    return cut
