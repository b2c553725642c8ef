"""The requests for a step: one to each group that takes part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpmd.arguments.call import Call
from mpmd.arguments.delivered import DeliveredArgument
from mpmd.ir.placement import Placement
from mpmd.ir.stack import Leaf
from mpmd.runtime.argument_cache import Delivery
from mpmd.runtime.nonfinite import NonFinitePolicy
from mpmd.runtime.protocol import LoadedProgram, Runtime
from mpmd.runtime.requests import Capture, Handle, StepRequest


class StepRequests:
    """Makes the requests for one step after another.

    Args:
      loaded: the program of the step, with the numbers of the mesh.
    """

    def __init__(self, loaded: LoadedProgram, argument_leaves: Sequence[Leaf], groups: Sequence[int]):
        self._program = loaded.number
        plan = loaded.plan
        self._argument_leaves = argument_leaves
        positions = iter(range(len(plan.inputs)))
        self._ranges = [[next(positions) for _ in leaf.names] for leaf in argument_leaves]
        self._placements = {
            i: Placement(leaf.mpmd_idxs, leaf.spec)
            for i, leaf in enumerate(plan.inputs)
            if leaf.name is not None
        }
        self._leaves = {group: (plan.inputs_of(group), plan.outputs_of(group)) for group in groups}
        self._donated = {
            group: [i for i, leaf in inputs.items() if leaf.donated]
            for group, (inputs, _) in self._leaves.items()
        }

    def _arguments(self, call: Call, runtime: Runtime, delivery: Delivery) -> dict[int, Handle]:
        """A handle for each argument that is read; values that groups lack are added to the delivery."""
        handles: dict[int, Handle] = {}
        for i, leaf in enumerate(self._argument_leaves):
            argument = DeliveredArgument(call.leaves[i], call.avals[i], call.donated[i], leaf.stack)
            for layer_range, position in enumerate(self._ranges[i]):
                if (placement := self._placements.get(position)) is not None:
                    handles[position] = argument.on(placement, layer_range, runtime, delivery)
        return handles

    def of_step(
        self,
        call: Call,
        runtime: Runtime,
        delivery: Delivery,
        results: Sequence[Handle],
        profile: bool,
        measure_memory: bool,
        captures: Mapping[int, Capture],
    ) -> dict[int, StepRequest]:
        arguments = self._arguments(call, runtime, delivery)
        number, refused = runtime.next_step(), NonFinitePolicy.here()
        return {
            group: StepRequest(
                program=self._program,
                step=number,
                inputs=tuple(map(arguments.__getitem__, inputs)),
                outputs=tuple(map(results.__getitem__, outputs)),
                donated=tuple(map(arguments.__getitem__, self._donated[group])),
                measure_memory=measure_memory,
                host_arrays=delivery.host_arrays[group],
                transient=delivery.transient(group),
                refused=refused,
                profile=profile,
                capture=captures.get(group),
            )
            for group, (inputs, outputs) in self._leaves.items()
        }
