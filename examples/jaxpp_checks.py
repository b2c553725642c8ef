"""The checks of ``jaxpp_tutorial.py``: where a pipeline's state is, what runs, and what is computed."""

import argparse
from typing import NamedTuple

import common
import jax
import numpy as np
from flax.training.train_state import TrainState

import mpmd
from mpmd.ir.plan import Cell

NUM_GROUPS = 4
RELATIVE_LIMIT = 1e-4  # of each leaf's norm
SIGNIFICANT = 1e-9  # the second moment of a gradient, 1e-3 of its square, that rounding does not turn round
ZERO = 1e-3  # of a gradient that is more than rounding
LEAST_SHARE = 0.9  # of the parameters that have such gradients
WIDTH = 160  # of lines of the plan

# What the tutorial prints: (stages, group) -> the group's tasks for four microbatches.
TUTORIAL_TASKS = {
    (4, 2): "fwd_2__0 fwd_2__1 fwd_2__2 bwd_2__0 fwd_2__3 bwd_2__1 bwd_2__2 bwd_2__3",
    (4, 3): " ".join(f"FusedTask(fwd_3__{i}, bwd_3__{i})" for i in range(4)),
    (8, 0): "fwd_0__0 fwd_0__1 fwd_0__2 fwd_0__3 fwd_4__0 fwd_4__1 fwd_4__2 fwd_4__3 "
    "bwd_4__0 bwd_4__1 bwd_4__2 bwd_4__3 bwd_0__0 bwd_0__1 bwd_0__2 bwd_0__3",
    (8, 3): "fwd_3__0 fwd_3__1 fwd_3__2 fwd_3__3 "
    + " ".join(f"FusedTask(fwd_7__{i}, bwd_7__{i})" for i in range(4))
    + " bwd_3__0 bwd_3__1 bwd_3__2 bwd_3__3",
}


class Result(NamedTuple):
    """The state after the last step, the loss of each step, and the seconds of the timed steps."""

    state: TrainState
    losses: list[float]
    seconds: float


def check_placement(state: TrainState, mesh, args: argparse.Namespace, num_stages: int) -> None:
    """Stage ``s`` lives on group ``s % NUM_GROUPS``; the step counters on all groups, with a copy on each."""
    count = state.opt_state[0].count
    print("step", state.step)
    for counter in (state.step, count):
        copies = counter.copies
        for group, copy in copies.items():
            print(f"copy on group {group}: {copy.value!r}, {copy.sharding}")
        assert [*copies] == [*counter.mpmd_idxs] == [*range(NUM_GROUPS)], counter.mpmd_idxs
        assert [int(copy.value) for copy in copies.values()] == [args.steps] * NUM_GROUPS, copies
        axes = [dict(copy.sharding.mesh.shape) for copy in copies.values()]
        assert axes == [dict(submesh.shape) for submesh in mesh.abstract_submeshes], axes
    if not args.ray:
        devices = [copy.sharding.mesh.devices for copy in state.step.copies.values()]
        print(devices)
        assert np.array_equal(devices, [submesh.devices for submesh in mesh.unstack]), devices
    for layer in range(args.layers):
        kernel = state.params[f"block_{layer}"]["Dense_0"]["kernel"]
        print(f"layer_{layer}", kernel)
        stage = layer // (args.layers // num_stages)
        (sharding,) = (copy.sharding for copy in kernel.copies.values())
        assert kernel.mpmd_idxs == (stage % NUM_GROUPS,), kernel.mpmd_idxs
        here = (args.d_model // args.data, 4 * args.d_model // args.model)
        assert sharding.shard_shape(kernel.shape) == here, sharding


def print_program(step) -> None:
    """The program of group 0 around its first task, and that task's executable."""
    lines = str(step.plan.programs[0]).splitlines()
    at = next(number for number, line in enumerate(lines) if " = run fwd_0__0 " in line)
    around = lines[max(at - 10, 0) : at + 50]
    print("\n".join(line[:WIDTH] for line in [*around, str(step.plan.executable("fwd_0"))]))
    for instruction in ("send", "free"):
        assert any(line.strip().startswith(f"{instruction} fwd_0__0.") for line in around), instruction


def check_tasks(step, args: argparse.Namespace, num_stages: int) -> None:
    """Compares what each group of the plan runs with the schedule, and with what the tutorial prints."""
    schedule = mpmd.Interleaved1F1B(num_stages=num_stages, mpmd_dim=NUM_GROUPS)
    for group, tasks in enumerate(schedule.tasks(args.microbatches)):
        runs = [str(run.task) for run in step.plan.programs[group].runs if isinstance(run.task, Cell)]
        print(f"group {group} runs: {' '.join(runs)}")
        assert runs == [*map(str, tasks)], f"the schedule has {tasks} for group {group}"
        expected = TUTORIAL_TASKS.get((num_stages, group))
        if args.microbatches == 4 and expected is not None:
            assert " ".join(runs) == expected, expected
            print("that is the tutorial's list")


def check_parity(actual: Result, expected: Result) -> None:
    """Compares losses, gradients and parameters after the last step with those of plain ``jax.jit``.

    Adam's moments are weighted sums of all gradients and of their squares, so they tell what the gradients
    were. AdamW divides by the size of the gradient: where that is near rounding, steps go either way by a
    learning rate. So parameters are compared where gradients are large beside rounding, which is nearly
    everywhere but for the bias of attention's key: it has no effect on softmax, and no gradient.
    """
    for index, pair in enumerate(zip(actual.losses, expected.losses, strict=True)):
        print(f"step {index + 1}: loss {pair[0]:.6f} in the pipeline, {pair[1]:.6f} by FSDP")
    moments, expected_moments = (mpmd.to_host(result.state.opt_state[0]) for result in (actual, expected))
    common.assert_close("losses", actual.losses, expected.losses, RELATIVE_LIMIT)
    common.assert_close("step", int(actual.state.step), int(expected.state.step), 0)
    for moment in (moments.mu, expected_moments.mu):
        check_key_biases(moment)
    for name in ("mu", "nu"):
        found, wanted = (without_key_biases(getattr(side, name)) for side in (moments, expected_moments))
        common.assert_close(f"gradients ({name})", found, wanted, RELATIVE_LIMIT)
    significant = jax.tree.map(lambda nu: nu > SIGNIFICANT, without_key_biases(expected_moments.nu))
    params, expected_params = (
        jax.tree.map(
            lambda p, there: np.where(there, p, 0), without_key_biases(mpmd.to_host(side)), significant
        )
        for side in (actual.state.params, expected.state.params)
    )
    common.assert_close("parameters", params, expected_params, RELATIVE_LIMIT)
    shares = [there.mean() for there in jax.tree.leaves(significant)]
    share = np.average(shares, weights=[there.size for there in jax.tree.leaves(significant)])
    print(f"compared parameters: {share:.1%} of all, {min(shares):.1%} of a leaf at least")
    assert share > LEAST_SHARE and min(shares) > 0, "too few parameters have gradients to compare"


def check_key_biases(moment: dict) -> None:
    """The gradients of the keys' biases are nothing beside those of the queries'."""
    for name, block in moment.items():
        key, query = (block["MultiHeadDotProductAttention_0"][of]["bias"] for of in ("key", "query"))
        share = np.linalg.norm(key) / np.linalg.norm(query)
        assert share < ZERO, f"the key's bias of {name} has {share:.1e} of the query's gradient"


def without_key_biases(tree: dict) -> dict:
    """The leaves of a tree like the parameters, by path, that have gradients."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    by_path = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    return {path: leaf for path, leaf in by_path.items() if not path.endswith("['key']['bias']")}
