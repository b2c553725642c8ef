"""Runs a step and its reference side by side."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractMesh

from mpmd.arrays.array import to_host
from mpmd.checking.judge import Check, judge
from mpmd.checking.perturb import coarsest_rounding, on_host, perturbed
from mpmd.compat import api_boundary
from mpmd.step.jit import MpmdFunction
from mpmd.step.loaded_step import LoadedStep
from mpmd.util.tree import paths
from mpmd.validation import callable_fault, int_fault, raise_faults, type_fault

_PERTURBED_RUNS = 8


@api_boundary
def check(
    step: MpmdFunction | LoadedStep, reference: Callable, *args: Any, steps: int = 3, **kwargs: Any
) -> Check:
    """Compares a step on groups with a reference in plain JAX, such as the function it was made from.

    ::

        print(mpmd.check(step, train_step, state, xs, ys))

    Both run several steps, each with its own state, fed back as the step returns it. Two programs round
    differently, so a difference alone says nothing. The reference therefore also runs with arguments that are
    moved by rounding: the movement of each element bounds the difference that the step may have there. This
    also shows the leaves that are rounding alone, such as the bias of keys under Adam, whose true gradient is
    zero; faults in them go unseen. The reference runs nine times, on one device: check a small model.

    Args:
      step: the result of ``mpmd.jit``, or of its ``compile``.
      reference: a function of the same arguments with the same result.
      args, kwargs: the arguments of the first step. They are copied: none is donated.
      steps: the number of steps to compare.

    Returns: the comparison of each leaf, with ``ok``; printable as a table.
    Raises: ``TypeError`` for anything but a step; ``ValueError`` when the results have different structures,
      shapes or dtypes, or for less than one step.
    """
    what = "a step, mpmd.jit(...) or mpmd.jit(...).compile(...)"
    raise_faults(
        type_fault("step", step, MpmdFunction | LoadedStep, what),
        callable_fault("reference", reference),
        int_fault("steps", steps),
        title="mpmd.check: ",
    )
    loaded = step.compile(*args, **kwargs) if isinstance(step, MpmdFunction) else step
    call = loaded.signature.bind(args, kwargs)
    call = dataclasses.replace(call, leaves=tuple(map(on_host, call.leaves)))
    fed_back = dict(loaded.compiled.step.fed_back_leaves)
    run = jax.jit(call.function(reference))

    def on_one_device(leaves: Sequence[Any]) -> Any:
        arguments, named = jax.tree.unflatten(call.treedef, leaves)
        return run(*arguments, **named)

    with _mesh_of_one_device(loaded.submeshes[0]):
        _check_alike(jax.eval_shape(on_one_device, call.leaves), loaded.compiled.step.out_shape)
    rounding = coarsest_rounding(loaded.compiled.program.jaxprs.values())
    moved = [perturbed(call.leaves, rounding, seed) for seed in range(_PERTURBED_RUNS)]
    copies = tuple(map(on_host, call.leaves))  # which the step may take over
    actual = _results(
        lambda leaves: loaded.submit(dataclasses.replace(call, leaves=tuple(leaves)))[0],
        copies,
        fed_back,
        steps,
    )
    with _mesh_of_one_device(loaded.submeshes[0]):
        expected, *others = [
            _results(on_one_device, leaves, fed_back, steps) for leaves in (call.leaves, *moved)
        ]
    replaced = {result: argument for argument, result in fed_back.items()}
    return Check(
        tuple(
            judge(
                path=f"result{path}",
                before=[leaves[replaced[i]] for leaves in (call.leaves, *moved)] if i in replaced else None,
                reference=[of_step[i] for of_step in expected],
                actual=[of_step[i] for of_step in actual],
                perturbed=[[of_step[i] for of_step in other] for other in others],
                rounding=rounding,
            )
            for i, path in enumerate(paths(loaded.compiled.step.out_shape))
        ),
        steps,
    )


def _mesh_of_one_device(submesh: AbstractMesh) -> AbstractContextManager:
    """Returns a context in which specs without a mesh are over the caller's mesh, or one device's."""
    if not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    sizes = (1,) * len(submesh.axis_names)
    return jax.set_mesh(
        jax.make_mesh(sizes, submesh.axis_names, submesh.axis_types, devices=jax.devices()[:1])
    )


def _results(
    run: Callable[[Sequence[Any]], Any], leaves: Sequence[Any], fed_back: Mapping[int, int], steps: int
) -> list[list[Any]]:
    results = []
    for _ in range(steps):
        result = jax.tree.leaves(run(leaves))
        results.append(to_host(result))
        leaves = [result[fed_back[i]] if i in fed_back else leaf for i, leaf in enumerate(leaves)]
    return results


def _check_alike(expected: Any, actual: Any) -> None:
    here: Any = jax.tree.structure(actual)
    there: Any = jax.tree.structure(expected)
    if here != there:
        raise ValueError(f"the step returns {here}, and the reference {there}")
    pairs = zip(paths(expected), jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    faults = [
        f"result{path} is {leaf.dtype}{list(leaf.shape)}, and the reference's is "
        f"{like.dtype}{list(like.shape)}"
        for path, leaf, like in pairs
        if (leaf.shape, leaf.dtype) != (like.shape, like.dtype)
    ]
    if faults:
        raise ValueError("\n".join(faults))
