"""Programs written by hand, small enough to be read, and a driver for them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.ir import (
    Aval,
    ConstantLeaf,
    Executable,
    Free,
    GroupProgram,
    InputLeaf,
    OutputLeaf,
    Plan,
    Recv,
    Run,
    Send,
)
from mpmd.program import Program
from mpmd.runtime.worker import StepRequest


def aval(shape, dtype="float32"):
    return Aval(tuple(shape), dtype, np.dtype(dtype).itemsize)


def executable(name, inputs, outputs, donated=(), in_specs=None, out_specs=None):
    in_specs = in_specs or [()] * len(inputs)
    out_specs = out_specs or [()] * len(outputs)
    return Executable(name, tuple(inputs), tuple(outputs), donated, tuple(in_specs), tuple(out_specs))


def group(mpmd_idx, *instructions):
    return GroupProgram(mpmd_idx, instructions)


class Driver:
    """Feeds steps of one program: keeps the handles of its inputs, and feeds back the named outputs.

    ``feedback`` maps an output's name to the input it becomes in the next step.
    """

    _steps = itertools.count()

    def __init__(self, runtime, program, values, feedback=()):
        self.runtime, self.plan = runtime, program.plan
        self.number = runtime.load(program).number
        self.handles = {name: runtime.next_handle() for name in values}
        self.unsent = {name: np.asarray(value) for name, value in values.items()}
        self.feedback = dict(feedback)

    def step(self, profile=False):
        """Submits one step; returns the futures, and the handles of the outputs by name."""
        step = next(self._steps)
        outputs = {leaf.name: self.runtime.next_handle() for leaf in self.plan.outputs}
        requests = {}
        for program in self.plan.programs:
            here = program.mpmd_idx
            inputs = [leaf.name for leaf in self.plan.inputs if here in leaf.mpmd_idxs]
            puts = {self.handles[name]: self.unsent[name] for name in inputs if name in self.unsent}
            requests[here] = StepRequest(
                self.number,
                step,
                tuple(self.handles[name] for name in inputs),
                tuple(outputs[leaf.name] for leaf in self.plan.outputs if here in leaf.mpmd_idxs),
                puts,
                profile=profile,
            )
        self.unsent = {}
        self.handles |= {into: outputs[name] for name, into in self.feedback.items()}
        return self.runtime.submit(requests), outputs


def train_program(width=4, batch=8, split=("fsdp",)):
    """Two stages, two microbatches, a loss, and a step of gradient descent on both weights.

    The batch is split within a group along ``split``; the specs of what is computed are left open.
    """
    w, mb, index, scalar = aval([width, width]), aval([batch, width]), aval([], "int32"), aval([])
    batches = aval([2, batch, width])
    rows = (None, *split)  # of batches: microbatches are not split, rows are

    def fwd_0(w0, xs, i):
        return (jnp.tanh(xs[i] @ w0),)

    def fwd_bwd_1(w1, ys, h, i, total, grad):
        loss, (dw, dh) = jax.value_and_grad(lambda w, h: jnp.mean((h @ w - ys[i]) ** 2), (0, 1))(w1, h)
        return total + loss, grad + dw, dh

    def bwd_0(w0, xs, i, dh, grad):
        return (grad + jax.vjp(lambda w: jnp.tanh(xs[i] @ w), w0)[1](dh)[0],)

    functions = {
        "zero": lambda: (jnp.zeros([width, width]),),
        "zero_loss": lambda: (jnp.zeros([]),),
        "fwd_0": fwd_0,
        "fwd_bwd_1": fwd_bwd_1,
        "bwd_0": bwd_0,
        "descend": lambda w, g: (w - 0.1 * g,),
    }
    executables = (
        executable("zero", [], [w]),
        executable("zero_loss", [], [scalar]),
        executable("fwd_0", [w, batches, index], [mb], (), [(), rows, ()], [None]),
        executable(
            "fwd_bwd_1",
            [w, batches, mb, index, scalar, w],
            [scalar, w, mb],
            (4, 5),
            [(), rows, None, (), (), ()],
            [(), (), None],
        ),
        executable("bwd_0", [w, batches, index, mb, w], [w], (4,), [(), rows, (), None, ()]),
        executable("descend", [w, w], [w], (0,)),
    )
    plan = Plan(
        (
            group(
                0,
                Run("before_0", "zero", (), ("g0",)),
                Run("fwd_0__0", "fwd_0", ("w0", "xs", "i0"), ("h0",)),
                Send(("h0",), 1, 0),
                Free(("h0",)),
                Run("fwd_0__1", "fwd_0", ("w0", "xs", "i1"), ("h1",)),
                Send(("h1",), 1, 1),
                Free(("h1",)),
                Recv(("dh0",), 1, 0),
                Recv(("dh1",), 1, 1),
                Run("bwd_0__0", "bwd_0", ("w0", "xs", "i0", "dh0", "g0"), ("g0_0",)),
                Free(("dh0",)),
                Run("bwd_0__1", "bwd_0", ("w0", "xs", "i1", "dh1", "g0_0"), ("g0_1",)),
                Run("after_0", "descend", ("w0", "g0_1"), ("w0_new",)),
            ),
            group(
                1,
                Recv(("h0",), 0, 0),
                Recv(("h1",), 0, 1),
                Run("before_0", "zero", (), ("g1",)),
                Run("before_1", "zero_loss", (), ("t",)),
                Run("fwd_1__0", "fwd_bwd_1", ("w1", "ys", "h0", "i0", "t", "g1"), ("t0", "g1_0", "dh0")),
                Send(("dh0",), 0, 0),
                Run("fwd_1__1", "fwd_bwd_1", ("w1", "ys", "h1", "i1", "t0", "g1_0"), ("t1", "g1_1", "dh1")),
                Send(("dh1",), 0, 1),
                Run("after_1", "descend", ("w1", "g1_1"), ("w1_new",)),
            ),
        ),
        executables,
        (
            InputLeaf("w0", "w0", w, (0,), (), True),
            InputLeaf("w1", "w1", w, (1,), (), True),
            InputLeaf("xs", "xs", batches, (0,), rows, False),
            InputLeaf("ys", "ys", batches, (1,), rows, False),
        ),
        (ConstantLeaf("i0", index, (0, 1)), ConstantLeaf("i1", index, (0, 1))),
        (
            OutputLeaf("w0", "w0_new", w, (0,), ()),
            OutputLeaf("w1", "w1_new", w, (1,), ()),
            OutputLeaf("loss", "t1", scalar, (1,), ()),
        ),
    )
    return Program(plan, functions, {"i0": np.array(0, "int32"), "i1": np.array(1, "int32")})


TRAIN_FEEDBACK = {"w0_new": "w0", "w1_new": "w1"}


def train_values(width=4, batch=8):
    """Inputs of ``train_program``."""
    numbers = np.random.default_rng(0)
    shapes = {"w0": [width] * 2, "w1": [width] * 2, "xs": [2, batch, width], "ys": [2, batch, width]}
    return {name: numbers.standard_normal(shape, "float32") for name, shape in shapes.items()}


@jax.jit
def train_reference(values):
    """What a step of ``train_program`` means."""

    def loss_fn(weights):
        h = jnp.tanh(values["xs"] @ weights["w0"])
        return jnp.mean((h @ weights["w1"] - values["ys"]) ** 2, axis=(1, 2)).sum()

    weights = {name: values[name] for name in ("w0", "w1")}
    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return loss, values | {name: weights[name] - 0.1 * grads[name] for name in weights}


def echo_program(arrays, num_groups=2):
    """Group 0 sends its inputs, in one message, around the ring of groups; the last one keeps them."""
    avals = [aval(a.shape, a.dtype.name) for a in arrays]
    names = tuple(f"v{i}" for i in range(len(arrays)))
    last = num_groups - 1
    programs = [group(0, Send(names, 1, 0))]
    programs += [group(i, Recv(names, i - 1, 0), Send(names, i + 1, 0), Free(names)) for i in range(1, last)]
    programs += [group(last, Recv(names, last - 1, 0))]
    plan = Plan(
        tuple(programs),
        (),
        tuple(InputLeaf(n, n, a, (0,), (), False) for n, a in zip(names, avals, strict=True)),
        (),
        tuple(OutputLeaf(n, n, a, (last,), ()) for n, a in zip(names, avals, strict=True)),
    )
    return Program(plan, {}, {}), dict(zip(names, arrays, strict=True))


def relay_program(work, shape=()):
    """Group 0 does ``work`` on its input ``x`` as ``fwd_0__0`` and sends ``y``; the others pass it on as
    ``fwd_<i>__0`` and wait for it, group 0 for what the last one makes of it."""
    a = aval(shape)
    plan = Plan(
        (
            group(
                0,
                Recv(("z",), 1, 0),
                Run("fwd_0__0", "work", ("x",), ("y",)),
                Send(("y",), 1, 0),
                Run("bwd_0__0", "next", ("z",), ("end",)),
            ),
            group(1, Recv(("y",), 0, 0), Run("fwd_1__0", "next", ("y",), ("z",)), Send(("z",), 0, 0)),
        ),
        (executable("work", [a], [a]), executable("next", [a], [a])),
        (InputLeaf("x", "x", a, (0,), (), False),),
        (),
        (OutputLeaf("end", "end", a, (0,), ()), OutputLeaf("z", "z", a, (1,), ())),
    )
    return Program(plan, {"work": work, "next": lambda x: (x + 1,)}, {})
