"""Hosts one group: its submesh, the values that live there between steps, and its programs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from mpmd.ir import Executable, Name, Plan, Recv, Run, Spec
from mpmd.program import Function, arguments, jitted
from mpmd.runtime.executor import Executor
from mpmd.runtime.transport import Transport
from mpmd.sharding import spec_of, to_sharding
from mpmd.timeline import Event
from mpmd.timing import Stopwatch

Handle = int
"""The driver's name of a value that lives on groups."""

_LOST = "this value was lost when an earlier step failed: "

INLINE_BYTES = 256
"""Results up to this size, a loss or a counter, travel with the reply of the step."""


@dataclasses.dataclass(frozen=True)
class StepRequest:
    """All that a group needs to know to run one step: the one message it gets from the driver.

    ``inputs`` has a handle for each of the group's inputs in plan order, ``outputs`` a handle for each of
    its outputs; ``puts`` are host arrays that come into being under a handle with this message, ``frees``
    the handles that the driver has dropped since the last one.
    """

    program: int
    step: int
    inputs: tuple[Handle, ...]
    outputs: tuple[Handle, ...]
    puts: Mapping[Handle, np.ndarray] = dataclasses.field(default_factory=dict)
    frees: tuple[Handle, ...] = ()
    profile: bool = False


@dataclasses.dataclass(frozen=True)
class StepReply:
    """What a group tells the driver about a step: its small results, and its events when asked for."""

    inline: Mapping[Handle, np.ndarray]
    events: tuple[Event, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Lost:
    """Stands where a value would be had the step that makes it not failed."""

    reason: str


@dataclasses.dataclass(frozen=True)
class _Loaded:
    executor: Executor
    shardings: tuple[jax.sharding.Sharding, ...]  # of the inputs
    donated: tuple[bool, ...]  # for each input
    inline: tuple[int, ...]  # outputs that travel with the reply


class GroupWorker:
    """Runs the programs of one group. Not thread-safe: one caller at a time, steps in order.

    Args:
      mpmd_idx: the group.
      submesh: its devices.
      transport: its end of the edges to the other groups.
    """

    def __init__(self, mpmd_idx: int, submesh: jax.sharding.Mesh, transport: Transport):
        self.mpmd_idx = mpmd_idx
        self.submesh = submesh
        self._transport = transport
        self._values: dict[Handle, jax.Array | _Lost] = {}
        self._programs: dict[int, _Loaded] = {}
        self._synchronous = submesh.devices.flat[0].platform == "cpu"

    def output_specs(self, executable: Executable, function: Function) -> tuple[Spec, ...]:
        """Compiles an executable whose ``out_specs`` are open and returns those the compiler chose."""
        compiled = jitted(function, executable, self.submesh).lower(*arguments(executable)).compile()
        chosen = zip(compiled.output_shardings, executable.outputs, strict=True)
        return tuple(spec_of(sharding, self.submesh, len(aval.shape)) for sharding, aval in chosen)

    def load(
        self,
        program: int,
        plan: Plan,
        functions: Mapping[str, Function],
        constants: Mapping[Name, np.ndarray],
    ) -> float:
        """Compiles all that this group runs of ``plan`` and keeps it under the number ``program``.

        Returns: the seconds that XLA took.
        """
        mine = plan.programs[self.mpmd_idx]
        needed = {i.executable for i in mine.instructions if isinstance(i, Run)}
        watch = Stopwatch()
        compiled: dict[str, jax.stages.Compiled] = {}
        for executable in plan.executables:
            if executable.name in needed:
                function = jitted(functions[executable.name], executable, self.submesh)
                lowered = function.lower(*arguments(executable))
                with watch("xla"):
                    compiled[executable.name] = lowered.compile()
        replicated = to_sharding((), self.submesh)
        here = [leaf.name for leaf in plan.constants if self.mpmd_idx in leaf.mpmd_idxs]
        executor = Executor(
            mine,
            plan,
            compiled,
            {name: jax.device_put(constants[name], replicated) for name in here},
            self._received_shardings(plan),
            self._transport,
            self._synchronous,
        )
        leaves = [leaf for leaf in plan.inputs if leaf.name and self.mpmd_idx in leaf.mpmd_idxs]
        shardings = tuple(to_sharding(leaf.spec, self.submesh) for leaf in leaves)
        donated = tuple(leaf.donated for leaf in leaves)
        results = [leaf for leaf in plan.outputs if self.mpmd_idx in leaf.mpmd_idxs]
        inline = tuple(i for i, leaf in enumerate(results) if leaf.aval.nbytes <= INLINE_BYTES)
        self._programs[program] = _Loaded(executor, shardings, donated, inline)
        return watch.seconds.get("xla", 0.0)

    def _received_shardings(self, plan: Plan) -> dict[Name, jax.sharding.Sharding]:
        """For each value this group receives, the sharding its reader was compiled for."""
        signatures = {e.name: e for e in plan.executables}
        wanted: dict[Name, jax.sharding.Sharding] = {}
        instructions = plan.programs[self.mpmd_idx].instructions
        for instruction in instructions:
            if isinstance(instruction, Run):
                in_specs = signatures[instruction.executable].in_specs
                for name, spec in zip(instruction.inputs, in_specs, strict=True):
                    assert spec is not None, f"{instruction.executable}: {name} has no spec"
                    wanted.setdefault(name, to_sharding(spec, self.submesh))
        outputs = {leaf.name: leaf.spec or () for leaf in plan.outputs}
        for instruction in instructions:
            if isinstance(instruction, Recv):
                for name in instruction.values:
                    wanted.setdefault(name, to_sharding(outputs.get(name, ()), self.submesh))
        return wanted

    def step(self, request: StepRequest) -> StepReply:
        """Runs one step. When it fails, its outputs are lost, and whoever reads them is told why."""
        self.free(request.frees)
        loaded = self._programs[request.program]
        try:
            inputs = self._take_inputs(loaded, request)
            events: list[Event] | None = [] if request.profile else None
            outputs = loaded.executor.step(request.step, inputs, events)
            inline = {request.outputs[i]: np.asarray(outputs[i]) for i in loaded.inline}
        except Exception as error:
            lost = _Lost(str(error).removeprefix(_LOST))
            missing = [handle for handle in request.puts if handle not in self._values]
            self._values.update(dict.fromkeys([*missing, *request.outputs], lost))
            raise
        self._values.update(zip(request.outputs, outputs, strict=True))
        return StepReply(inline, tuple(events or ()))

    def _take_inputs(self, loaded: _Loaded, request: StepRequest) -> list[jax.Array]:
        for handle, sharding in zip(request.inputs, loaded.shardings, strict=True):
            if handle in request.puts:
                # The host array may be a view of memory that its sender will reuse: copy.
                self._values[handle] = jax.device_put(np.array(request.puts[handle]), sharding)
        inputs = [self._value(handle) for handle in request.inputs]
        holders = collections.Counter(map(id, self._values.values())) if any(loaded.donated) else {}
        for i, (value, sharding) in enumerate(zip(inputs, loaded.shardings, strict=True)):
            if value.sharding != sharding:
                inputs[i] = jax.device_put(value, sharding)
            if loaded.donated[i]:
                if holders[id(value)] > 1:
                    # Another result is the same array, or shares its buffer, and it must survive.
                    inputs[i] = jax.device_put(inputs[i], sharding, may_alias=False)  # compiles nothing
                del self._values[request.inputs[i]]
        return inputs

    def _value(self, handle: Handle) -> jax.Array:
        value = self._values[handle]
        if isinstance(value, _Lost):
            raise RuntimeError(_LOST + value.reason)
        return value

    def fetch(self, handle: Handle) -> jax.Array:
        """The array under a handle."""
        return self._value(handle)

    def free(self, handles: Sequence[Handle]) -> None:
        """Forgets values; unknown handles are those that a donation has already taken."""
        for handle in handles:
            self._values.pop(handle, None)
