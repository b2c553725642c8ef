"""Small programs written by hand, without the compiler, and a driver that runs their steps."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mpmd.ir.plan import (
    Aval,
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
from tests.support.plans import executable, run_of

SECONDS = 60


def compute_forever(x):
    return (jax.lax.while_loop(lambda y: y < 2, jnp.sin, x),)


def allocate_too_much(x):
    return (too_much(x),)


def aval(shape, dtype="float32"):
    return Aval(tuple(shape), dtype, np.dtype(dtype).itemsize)


def group(mpmd_idx, *instructions):
    return GroupProgram(mpmd_idx, instructions)


class ProgramDriver:
    """Submits steps of one program, and keeps the handles of its inputs."""

    def __init__(self, runtime, program, values):
        self.runtime, self.plan = runtime, program.plan
        self.number = runtime.load(program).number
        self.handles = {name: runtime.next_handle() for name in values}
        self.unsent = {name: np.asarray(value) for name, value in values.items()}

    def step(self):
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
            )
        self.unsent = {}
        return self.runtime.ask(requests), outputs


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


ARRAYS = [
    np.array(3, "int32"),
    np.array(True),
    np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16),
    np.arange(5).astype(ml_dtypes.float8_e4m3fn),
    np.zeros((0, 4), "float32"),
    np.array([2**40, 1]),
    np.array([1 / 3]),
    np.random.default_rng(0).standard_normal((512, 513), "float32"),
    np.arange(2**18).reshape(512, 512).astype(ml_dtypes.bfloat16),
]


def assert_messages_keep_every_bit(mesh):
    """Also those of values of 64 bits."""
    with jax.enable_x64(True):
        program, values = echo_program(ARRAYS, mesh.mpmd_dim)
        driver = ProgramDriver(mesh.runtime, program, values)
        for _ in range(3):
            futures, outputs = driver.step()
            for future in futures.values():
                future.result(SECONDS)
            for name, array in values.items():
                arrived = mesh.runtime.fetch(mesh.mpmd_dim - 1, outputs[name]).result(SECONDS)
                assert arrived.dtype == array.dtype
                np.testing.assert_array_equal(arrived, array)


def add_one(x):
    return (x + 1,)


def relay_program(work=add_one):
    """Group 0 computes ``y = work(x)`` as ``fwd_0__0``; group 1 computes ``z = y + 1`` as ``fwd_1__0`` and
    sends it back; group 0 computes ``end = z + 1``."""
    a = aval(())
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
    return Program(plan, {"work": work, "next": add_one}, {})


def relaying(mesh, work=add_one):
    """Drives ``relay_program``, with 1 for ``x``."""
    return ProgramDriver(mesh.runtime, relay_program(work), {"x": np.float32(1)})


def wait_until_relaying(mesh, seconds=20):
    """Waits until group 0 runs the work of ``relay_program``, and group 1 waits for what it makes."""
    end = time.monotonic() + seconds
    while True:
        zero, one = (process.state for process in mesh.status().processes)
        if zero.startswith("running fwd_0__0") and one.startswith("waiting for message 0 of group 0 in step"):
            return
        assert time.monotonic() < end, f"group 0 is {zero}, group 1 is {one}"
        time.sleep(0.01)
