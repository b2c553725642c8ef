"""The microbatch loop: ``treduce`` and the operations that combine the results of microbatches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpmd.compat import api_boundary, with_constants_as_inputs
from mpmd.language.carry import Microbatch
from mpmd.language.decisions import current_decisions, in_loop, marked_as_decided, next_loop
from mpmd.language.operations import Op, is_op, operation_faults
from mpmd.language.pieces import count_along, list_explained
from mpmd.schedules import ForwardOnly, Schedule
from mpmd.schedules.base import schedule_fault
from mpmd.sharding import described, explicit_sharding, for_each_dimension, gathered_along, to_sharding
from mpmd.util.tree import array_faults, broadcast_prefix
from mpmd.validation import callable_fault, int_fault, raise_faults, str_fault


@dataclasses.dataclass(frozen=True)
class _Add:
    """Elementwise sum."""

    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(a.shape, a.dtype)

    def update(self, state: jax.Array, update: jax.Array, index: jax.Array) -> jax.Array:
        return lax.add(state, lax.convert_element_type(update, state.dtype))


@dataclasses.dataclass(frozen=True)
class _Mean(_Add):
    """Elementwise mean: a sum, which is divided after the loop. Of integers and booleans it is a float."""

    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        is_summed_as_it_is = jnp.issubdtype(a.dtype, jnp.inexact)
        return jnp.zeros(a.shape, a.dtype if is_summed_as_it_is else jax.eval_shape(jnp.mean, a).dtype)

    def of_sum(self, total: jax.Array, n: int) -> jax.Array:
        """The mean of ``n`` values. ``n`` is float32 at least, because half precision cannot count far."""
        wide = total.dtype if total.dtype.itemsize >= 4 else jnp.float32
        return lax.div(total.astype(wide), jnp.full(total.shape, n, wide)).astype(total.dtype)


@dataclasses.dataclass(frozen=True)
class _Max:
    """Elementwise maximum."""

    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(a.shape, _lowest(a.dtype), a.dtype)

    def update(self, state: jax.Array, update: jax.Array, index: jax.Array) -> jax.Array:
        return lax.max(state, update)


def _lowest(dtype) -> Any:
    if dtype == jnp.bool_:
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min
    lowest = np.asarray(-np.inf, dtype)
    return jnp.finfo(dtype).min if np.isnan(lowest) else lowest  # some float8 types have no infinity


Add = _Add()
Mean = _Mean()
Max = _Max()


@dataclasses.dataclass(frozen=True)
class Concat:
    """Stacks the microbatches' values along a new axis ``axis`` of the result (from its end, if negative)."""

    axis: int = 0

    def __post_init__(self) -> None:
        raise_faults(int_fault("Concat's axis", self.axis, -math.inf))

    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        if not -len(a.shape) - 1 <= self.axis <= len(a.shape):
            raise ValueError(f"{self} cannot stack values of shape {a.shape}: the result has no such axis")
        axis = self.axis % (len(a.shape) + 1)
        zeros = jnp.zeros((*a.shape[:axis], n, *a.shape[axis:]), a.dtype)
        sharding = explicit_sharding(a)
        if sharding is None:
            return zeros
        entries = for_each_dimension(sharding.spec, len(a.shape))
        entries.insert(axis, None)
        return jax.sharding.reshard(zeros, to_sharding(entries, sharding.mesh))

    def update(self, state: jax.Array, update: jax.Array, index: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(state, update, index, self.axis % state.ndim)


@api_boundary
def treduce(
    fun: Callable[..., Any],
    xs: Any,
    schedule: Schedule | None = None,
    axis: int = 0,
    operation: Any = (Concat(), Add),
    carry: Any = None,
    *,
    part: str | None = None,
) -> Any:
    """Applies ``fun`` to every microbatch and accumulates the results, pipelined by ``schedule``.

    It means the loop below, which ``mpmd.jit`` pipelines and plain JAX runs as a ``lax.scan``::

        def treduce(fun, xs, operation):
            state = [operation.state(n, shape_of_result)]
            for i in range(n):
                state = operation.update(state, fun(xs[i]), i)
            return state

    With a ``carry``, such as the batch statistics of normalisation layers, ``fun`` takes and returns that,
    too, as the function of a ``lax.scan`` does::

        for i in range(n):
            carry, result = fun(carry, xs[i])
            state = operation.update(state, result, i)
        return carry, state

    A step may have several such loops, each with a schedule of its own. They run in the order in which they
    are written, and later ones may read the results of earlier ones.

    A stage reads and updates its leaves of the carry in its forward, one microbatch after the other. Later
    stages and backwards read the value that the leaf had in the forward of their microbatch. Earlier stages
    cannot read it: the next microbatch would wait there until this one has reached the later stage.

    Args:
      fun: takes one microbatch, a pytree like ``xs`` without the axis, and returns a pytree of arrays; with a
        carry, takes the carry and a microbatch, and returns the next carry and the pytree.
      xs: a pytree of arrays that all have the same size along ``axis``: the number of microbatches.
      schedule: the order of the stages' tasks, e.g. ``mpmd.Std1F1B(num_stages=4)``. The schedule that a plan
        decides takes its place. ``None`` leaves it to a plan; plain JAX needs none. A function without marks
        is cut between layers into the stages of a ``ForwardOnly`` schedule. One that differentiates has to
        say before that where stages end: by marks, or with ``mpmd.auto_marks`` or ``mpmd.value_and_grad``.
      axis: the axis of every leaf of ``xs`` that counts microbatches. If the type of a leaf shards it along
        explicit mesh axes, the microbatches are gathered before the loop.
      operation: an ``Op``, or a pytree prefix of the result with an ``Op`` for each subtree. By default the
        first of two results is stacked and the second summed: the losses and the gradients. If ``fun`` takes
        the mean over its microbatch, ``Mean`` gives the result of the whole batch, and ``Add`` gives ``n``
        times that.
      carry: a pytree of arrays that the first microbatch takes; its shapes and dtypes stay. ``None``: none.
      part: the part of the mesh whose groups run the loop, by its name, in a step of the whole mesh. By
        default, the schedule's groups are the mesh's. It means nothing to plain JAX.

    Returns: the accumulated results; with a carry, the pair of the last microbatch's carry and these.
    Raises: ``ValueError`` when the leaves of ``xs`` differ in size along ``axis``, or when there is no
      microbatch or no leaf; ``TypeError`` when ``operation`` does not match the result, when ``fun`` returns
      another carry than it takes, or when ``schedule`` is of another type. When the step is compiled,
      ``CompileError`` without a schedule; for a leaf of the carry that a stage reads before the stage that
      updates it; and for a schedule that runs the microbatches of such a stage in another than ascending
      order.
    """
    raise_faults(
        callable_fault("fun", fun),
        int_fault("axis", axis, -math.inf),
        schedule_fault("schedule", schedule, optional=True),
        *array_faults("xs", xs),
        *operation_faults("operation", operation),
        *array_faults("carry", carry),
        str_fault("part", part, optional=True),
        title="treduce: ",
    )
    length = count_along(axis, xs)
    if isinstance(schedule, ForwardOnly) and carry is None:
        fun = marked_as_decided(fun, schedule)
    xs = jax.tree.map(partial(gathered_along, axis), xs)

    def fun_of_index(*carry_and_index):
        *taken_carry, i = carry_and_index
        microbatch = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, axis, keepdims=False), xs)
        with list_explained({"xs": xs}):
            return fun(*taken_carry, microbatch)

    return treduce_i(fun_of_index, length, schedule, operation, carry, part=part)


@api_boundary
def treduce_i(
    fun: Callable[..., Any],
    length: int,
    schedule: Schedule | None = None,
    operation: Any = (Concat(), Add),
    carry: Any = None,
    *,
    part: str | None = None,
) -> Any:
    """``treduce`` over the microbatch index: ``fun`` takes an int32 scalar from 0 to ``length - 1``.

    With a carry, ``fun`` takes the carry first. Arguments, result and errors are as for ``treduce``.
    """
    raise_faults(
        callable_fault("fun", fun),
        int_fault("length", length),
        schedule_fault("schedule", schedule, optional=True),
        *operation_faults("operation", operation),
        *array_faults("carry", carry),
        str_fault("part", part, optional=True),
        title="treduce: ",
    )
    with next_loop() as number:
        schedule = _decided(schedule)
        with in_loop(1 if schedule is None else schedule.slices):
            microbatch = Microbatch.of(fun, carry)
    ops = _broadcast_operation(operation, microbatch.result)
    states = [_initial(op, length, out) for op, out in zip(ops, microbatch.outs, strict=True)]
    summed = tuple(isinstance(op, _Add) for op in ops)
    results = _bind(
        (*microbatch.states, *states),
        _body(microbatch, ops, states),
        summed=(False,) * len(microbatch.states) + summed,
        ordered=(True,) * len(microbatch.states) + tuple(map(_is_ordered, ops)),
        carried=(True,) * len(microbatch.states) + (False,) * len(ops),
        length=length,
        schedule=schedule,
        number=number,
        part=part,
    )
    totals = [
        op.of_sum(result, length) if isinstance(op, _Mean) else result
        for op, result in zip(ops, results[len(microbatch.states) :], strict=True)
    ]
    reduced = jax.tree.unflatten(jax.tree.structure(microbatch.result), totals)
    return reduced if carry is None else (microbatch.carry_with(results), reduced)


def _decided(schedule: Any) -> Schedule | None:
    decided = current_decisions().schedule
    return schedule if decided is None else decided


def _body(microbatch: Microbatch, ops: Sequence[Op], initial: Sequence[Any]) -> Callable:
    """The function of the index and the states that are no plain sums.

    It returns the next leaves of the carry, then for each result its addend or its new state.
    """

    def body(i, *states):
        next_carry, values = microbatch(i, states[: len(microbatch.states)])
        remaining = iter(states[len(microbatch.states) :])
        return next_carry + [
            lax.convert_element_type(value, jnp.result_type(first))
            if isinstance(op, _Add)
            else _updated(op, next(remaining), value, i)
            for op, value, first in zip(ops, values, initial, strict=True)
        ]

    return body


def _bind(states: Sequence[Any], body: Callable, *, summed: tuple[bool, ...], **params: Any) -> list[Any]:
    read = [state for state, is_sum in zip(states, summed, strict=True) if not is_sum]
    index = jax.ShapeDtypeStruct((), jnp.int32)
    closed = jax.make_jaxpr(body)(index, *(described(jax.typeof(state)) for state in read))
    open_body = with_constants_as_inputs(closed)
    return treduce_p.bind(*closed.consts, *states, body=open_body, summed=summed, **params)


def _is_ordered(op: Op) -> bool:
    return not isinstance(op, _Add | _Max | Concat)


def _broadcast_operation(operation: Any, out_shape: Any) -> list[Op]:
    try:
        return broadcast_prefix(operation, out_shape, is_op)
    except ValueError as error:
        raise TypeError(
            f"treduce's operation {operation} is not a pytree prefix of the loop's result, which has the "
            f"structure {jax.tree.structure(out_shape)}"
        ) from error


def _array(value: Any, what: str) -> Any:
    if not jax.tree_util.all_leaves([value]):
        raise TypeError(
            f"{what} returned a {type(value).__name__}; the state of an operation is one array: return the "
            "parts from the loop as results of their own, with an operation for each"
        )
    return value


def _initial(op: Op, length: int, value: jax.ShapeDtypeStruct) -> Any:
    """The state before the first microbatch, with the explicit sharding that an update gives it."""
    state = _array(op.state(length, value), f"{op}.state")
    if explicit_sharding(value) is None:
        return state
    state = jnp.asarray(state)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    update = jax.make_jaxpr(partial(_updated, op))(described(jax.typeof(state)), value, index)
    after = explicit_sharding(update.out_avals[0])
    return state if after is None else jax.sharding.reshard(state, after)


def _updated(op: Op, state: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    new = _array(op.update(state, value, index), f"{op}.update")
    if jnp.shape(new) != state.shape or jnp.result_type(new) != state.dtype:
        raise TypeError(
            f"{op}.update returned {jnp.result_type(new)}{list(jnp.shape(new))} for a state of "
            f"{state.dtype}{list(state.shape)}; it must keep the state's shape and dtype"
        )
    return new


treduce_p = Primitive("treduce")
"""Operands: the body's closed-over values, then the initial states.

Parameters: ``body``, a jaxpr without constants, that takes the closed-over values, the index and the states
that are not plain sums; ``summed``, for each result, whether the body returns an addend of a plain sum
(otherwise it returns the new state); ``ordered``, for each result, whether it may depend on the order of the
microbatches; ``carried``, for each result, whether it is a leaf of the user's carry; ``length``, the number
of microbatches; ``schedule``, ``None`` if it is open; ``number``, the position of the loop in the step's
decisions; ``part``, the name of the part of the mesh that runs it, or ``None``.
"""
treduce_p.multiple_results = True


SCOPE = "treduce"
"""The name of a loop's scan in name stacks."""


def as_scan(*operands, body: core.Jaxpr, summed: tuple[bool, ...], length: int, **of_pipeline):
    """The meaning of the loop: a scan over the microbatch index."""
    closed_over = len(operands) - len(summed)
    consts, states = operands[:closed_over], operands[closed_over:]
    run = core.jaxpr_as_fun(core.ClosedJaxpr(body, ()))

    def one(states, i):
        values = run(*consts, i, *(state for state, is_sum in zip(states, summed, strict=True) if not is_sum))
        return [
            lax.add(state, value) if is_sum else _of_dtype(value, state.dtype)
            for state, value, is_sum in zip(states, values, summed, strict=True)
        ], None

    with jax.named_scope(SCOPE):
        return lax.scan(one, list(states), jnp.arange(length, dtype=jnp.int32))[0]


def _of_dtype(value: Any, dtype: Any) -> jax.Array:
    # A constant may be a Python bool, which has no dtype.
    return value if jnp.result_type(value) == dtype else lax.convert_element_type(value, dtype)


@treduce_p.def_impl
def _impl(*operands, **params):
    return jax.jit(partial(as_scan, **params))(*operands)


@treduce_p.def_effectful_abstract_eval
def _abstract_eval(*avals, body, summed, **params):
    return list(avals[len(avals) - len(summed) :]), body.effects


def _jvp(primals, tangents, **params):
    return jax.jvp(partial(as_scan, **params), primals, tuple(map(ad.instantiate_zeros, tangents)))


def _batch(axis: Any, operands: Sequence[Any], dims: Sequence[int | None], *, body, summed, **params):
    """The loop of a population: its body under ``jax.vmap``, and states with a first axis for its members."""
    if all(dim is None for dim in dims):
        return treduce_p.bind(*operands, body=body, summed=summed, **params), [None] * len(summed)
    in_members = partial(
        jax.vmap, axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name, out_axes=0
    )
    closed_over = len(operands) - len(summed)
    consts, const_dims = operands[:closed_over], tuple(dims[:closed_over])
    states = in_members(lambda *states: states, in_axes=tuple(dims[closed_over:]))(*operands[closed_over:])
    run = core.jaxpr_as_fun(core.ClosedJaxpr(body, ()))

    def body_of_members(i, *states):
        in_axes = (*const_dims, None, *(0 for _ in states))
        return in_members(run, in_axes=in_axes)(*consts, i, *states)

    return _bind(states, body_of_members, summed=summed, **params), [0] * len(states)


ad.primitive_jvps[treduce_p] = _jvp
batching.fancy_primitive_batchers[treduce_p] = _batch
mlir.register_lowering(treduce_p, mlir.lower_fun(as_scan, multiple_results=True))
