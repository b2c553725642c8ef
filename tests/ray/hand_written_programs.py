"""Small programs written by hand, without the compiler, and a driver that runs their steps."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.ir.plan import (
    Aval,
    ConstantLeaf,
    Executable,
    Free,
    GroupProgram,
    InputLeaf,
    OutputLeaf,
    Plan,
    Recv,
    Send,
)
from mpmd.program import Program
from mpmd.runtime.requests import StepRequest
from tests.support.models import too_much
from tests.support.plans import run_of


def compute_forever(x):
    return (jax.lax.while_loop(lambda y: y < 2, jnp.sin, x),)


def allocate_too_much(x):
    return (too_much(x),)


def aval(shape, dtype="float32"):
    return Aval(tuple(shape), dtype, np.dtype(dtype).itemsize)


def executable(name, inputs, outputs, donated=(), in_specs=None, out_specs=None):
    in_specs = in_specs or [()] * len(inputs)
    out_specs = out_specs or [()] * len(outputs)
    return Executable(name, tuple(inputs), tuple(outputs), donated, tuple(in_specs), tuple(out_specs))


def group(mpmd_idx, *instructions):
    return GroupProgram(mpmd_idx, instructions)


class ProgramDriver:
    """Submits steps of one program, and keeps the handles of its inputs.

    ``feedback`` maps the name of an output to the input that it becomes in the next step.
    """

    def __init__(self, runtime, program, values, feedback=()):
        self.runtime, self.plan = runtime, program.plan
        self.number = runtime.load(program).number
        self.handles = {name: runtime.next_handle() for name in values}
        self.unsent = {name: np.asarray(value) for name, value in values.items()}
        self.feedback = dict(feedback)

    def step(self, profile=False):
        """Submits one step. Returns the futures by group, and the handles of the outputs by name."""
        step = self.runtime.next_step()
        outputs = {leaf.name: self.runtime.next_handle() for leaf in self.plan.outputs}
        requests = {}
        for program in self.plan.programs:
            here = program.mpmd_idx
            inputs = [leaf.name for leaf in self.plan.inputs if here in leaf.mpmd_idxs]
            requests[here] = StepRequest(
                program=self.number,
                step=step,
                inputs=tuple(self.handles[name] for name in inputs),
                outputs=tuple(outputs[leaf.name] for leaf in self.plan.outputs if here in leaf.mpmd_idxs),
                host_arrays={self.handles[name]: self.unsent[name] for name in inputs if name in self.unsent},
                profile=profile,
            )
        self.unsent = {}
        self.handles |= {into: outputs[name] for name, into in self.feedback.items()}
        return self.runtime.ask(requests), outputs


def train_program(width=4, batch=8, split=("fsdp",)):
    """Two stages, two microbatches, a loss, and a step of gradient descent on both weights.

    The rows of a batch are split over the axes ``split`` of a group; specs of activations are left open.
    """
    w, mb, index, scalar = aval([width, width]), aval([batch, width]), aval([], "int32"), aval([])
    batches = aval([2, batch, width])
    rows = (None, *split)  # the first axis counts microbatches

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
                run_of("before_0", "zero", (), ("g0",)),
                run_of("fwd_0__0", "fwd_0", ("w0", "xs", "i0"), ("h0",)),
                Send(("h0",), 1, 0),
                Free(("h0",)),
                run_of("fwd_0__1", "fwd_0", ("w0", "xs", "i1"), ("h1",)),
                Send(("h1",), 1, 1),
                Free(("h1",)),
                Recv(("dh0",), 1, 0),
                Recv(("dh1",), 1, 1),
                run_of("bwd_0__0", "bwd_0", ("w0", "xs", "i0", "dh0", "g0"), ("g0_0",)),
                Free(("dh0",)),
                run_of("bwd_0__1", "bwd_0", ("w0", "xs", "i1", "dh1", "g0_0"), ("g0_1",)),
                run_of("after_0", "descend", ("w0", "g0_1"), ("w0_new",)),
            ),
            group(
                1,
                Recv(("h0",), 0, 0),
                Recv(("h1",), 0, 1),
                run_of("before_0", "zero", (), ("g1",)),
                run_of("before_1", "zero_loss", (), ("t",)),
                run_of("fwd_1__0", "fwd_bwd_1", ("w1", "ys", "h0", "i0", "t", "g1"), ("t0", "g1_0", "dh0")),
                Send(("dh0",), 0, 0),
                run_of(
                    "fwd_1__1", "fwd_bwd_1", ("w1", "ys", "h1", "i1", "t0", "g1_0"), ("t1", "g1_1", "dh1")
                ),
                Send(("dh1",), 0, 1),
                run_of("after_1", "descend", ("w1", "g1_1"), ("w1_new",)),
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
    """The inputs of ``train_program``, by name."""
    numbers = np.random.default_rng(0)
    shapes = {"w0": [width] * 2, "w1": [width] * 2, "xs": [2, batch, width], "ys": [2, batch, width]}
    return {name: numbers.standard_normal(shape, "float32") for name, shape in shapes.items()}


@jax.jit
def train_reference(values):
    """The loss of a step of ``train_program``, and the inputs of the next step, by plain JAX."""

    def loss_fn(weights):
        h = jnp.tanh(values["xs"] @ weights["w0"])
        return jnp.mean((h @ weights["w1"] - values["ys"]) ** 2, axis=(1, 2)).sum()

    weights = {name: values[name] for name in ("w0", "w1")}
    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return loss, values | {name: weights[name] - 0.1 * grads[name] for name in weights}


def echo_program(arrays, num_groups=2):
    """Group 0 sends its inputs in one message. Each group passes it on to the next; the last one keeps it."""
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
    """Group 0 computes ``y = work(x)`` as ``fwd_0__0``; group 1 computes ``z = y + 1`` as ``fwd_1__0`` and
    sends it back; group 0 computes ``end = z + 1``."""
    a = aval(shape)
    plan = Plan(
        (
            group(
                0,
                Recv(("z",), 1, 0),
                run_of("fwd_0__0", "work", ("x",), ("y",)),
                Send(("y",), 1, 0),
                run_of("bwd_0__0", "next", ("z",), ("end",)),
            ),
            group(1, Recv(("y",), 0, 0), run_of("fwd_1__0", "next", ("y",), ("z",)), Send(("z",), 0, 0)),
        ),
        (executable("work", [a], [a]), executable("next", [a], [a])),
        (InputLeaf("x", "x", a, (0,), (), False),),
        (),
        (OutputLeaf("end", "end", a, (0,), ()), OutputLeaf("z", "z", a, (1,), ())),
    )
    return Program(plan, {"work": work, "next": lambda x: (x + 1,)}, {})


def wait_until_relaying(mesh, seconds=20):
    """Waits until group 0 runs the work of ``relay_program``, and group 1 waits for what it makes."""
    end = time.monotonic() + seconds
    while True:
        zero, one = (process.state for process in mesh.status().processes)
        if zero.startswith("running fwd_0__0") and one.startswith("waiting for message 0 of group 0 in step"):
            return
        assert time.monotonic() < end, f"group 0 is {zero}, group 1 is {one}"
        time.sleep(0.01)
