"""The pipeline as one would write it on Ray: an actor per stage, and its tasks as calls of its methods."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray
from ray.dag import InputNode, MultiOutputNode

import mpmd
from benchmarks import model
from benchmarks.workload import Setting, Workload
from mpmd.ir.plan import Task
from mpmd.schedules import total_order

_IN_FLIGHT = 2
"""Steps submitted at a time."""

_COMPILE_SECONDS = 240.0
"""The seconds that a step may take: by default graphs give up after 10 s, and the first step compiles."""

_HEADER_BYTES = 2**14
"""Bytes that a message may have besides its arrays."""


class Stage:
    """A stage on an actor: parameters, optimizer, and the values that forwards keep for their backwards.

    The last stage computes the loss and its gradient in one call, after which it has no backward.
    """

    def __init__(self, workload: Workload, stage: int):
        params = jax.tree.map(jnp.array, model.stage_params(workload, stage))
        self._state = params, model.OPTIMIZER.init(params)
        self._workload = workload
        self._is_first = stage == 0
        self._forward = jax.jit(self._forward_with_pullback)
        self._backward = jax.jit(self._accumulated_backward, donate_argnums=1)
        self._loss = jax.jit(self._accumulated_loss, donate_argnums=2)
        self._update = jax.jit(self._updated, donate_argnums=(0, 1))
        self._zeros = jax.jit(lambda params: (jax.tree.map(jnp.zeros_like, params), jnp.zeros(())))
        self._sums = self._zeros(params)
        self._pullbacks: dict[int, Any] = {}

    def _outputs(self, params: dict, x: jax.Array) -> jax.Array:
        x = model.embed(params, x) if self._is_first else x
        return model.apply_blocks(params, x, self._workload)

    def _forward_with_pullback(self, params: dict, x: jax.Array):
        if self._is_first:  # tokens have no gradient
            return jax.vjp(lambda params: self._outputs(params, x), params)
        return jax.vjp(self._outputs, params, x)

    def _accumulated_backward(self, pullback, sums, dy: jax.Array):
        gradients, *dx = pullback(dy)
        return (jax.tree.map(jnp.add, sums[0], gradients), sums[1]), dx

    def _accumulated_loss(self, params: dict, x: jax.Array, sums, targets: jax.Array):
        def loss(params, x):
            return model.head_loss(params, self._outputs(params, x), targets)

        value, (gradients, dx) = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
        return (jax.tree.map(jnp.add, sums[0], gradients), sums[1] + value), dx

    def _updated(self, state: model.State, sums):
        gradients, loss = jax.tree.map(lambda leaf: leaf / self._workload.microbatches, sums)
        return model.updated(state, gradients), loss

    def forward(self, microbatch: int, x: np.ndarray) -> np.ndarray:
        x = x[microbatch] if self._is_first else x  # tokens of the whole batch
        y, self._pullbacks[microbatch] = self._forward(self._state[0], x)
        return np.asarray(y)

    def loss_and_backward(self, microbatch: int, x: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Runs the last stage's forward and backward; ``targets`` has the whole batch."""
        self._sums, dx = self._loss(self._state[0], x, self._sums, targets[microbatch])
        return np.asarray(dx)

    def backward(self, microbatch: int, dy: np.ndarray) -> np.ndarray | None:
        pullback = self._pullbacks.pop(microbatch)
        self._sums, dx = self._backward(pullback, self._sums, dy)
        return np.asarray(dx[0]) if dx else None

    def update(self, *after: Any) -> float:
        """Takes a step of the optimizer; returns the loss on the last stage, 0 on other stages.

        ``after`` are results that have to exist before.
        """
        self._state, loss = self._update(self._state, self._sums)
        self._sums = self._zeros(self._state[0])
        return float(loss)


class _ByHand(abc.ABC):
    """The actors, and the tasks of all groups in an order in which they may be submitted."""

    def __init__(self, setting: Setting):
        self._workload = workload = setting.workload
        setting.setup.join_ray()
        environment = {"env_vars": setting.setup.environment(1, setting.share)}
        stage = ray.remote(num_cpus=0, runtime_env=environment)(Stage)
        self._actors: list[Any] = [stage.remote(workload, i) for i in range(workload.groups)]
        self._batch = model.batch(workload)
        order = total_order(mpmd.Std1F1B(workload.groups).tasks(workload.microbatches))
        self._tasks = [task for _, cell in order for task in cell.tasks]

    def run(self, steps: int) -> float:
        submitted: list[Any] = []
        for _ in range(steps):
            submitted.append(self._submit())
            if len(submitted) > _IN_FLIGHT:
                ray.get(submitted.pop(0), timeout=_COMPILE_SECONDS)
        return [ray.get(losses, timeout=_COMPILE_SECONDS)[-1] for losses in submitted][-1]

    @abc.abstractmethod
    def _submit(self) -> Any:
        """Submits a step; the loss is the last of the results."""

    def _calls(self, call: Callable[..., Any], tokens: Any, targets: Any) -> list[Any]:
        """Calls the method of each task, and then ``update`` of each actor, with results of earlier calls.

        Args:
          call: calls a method of an actor with arguments, now or in a graph.
        """
        values: dict[Task, Any] = {}
        last = len(self._actors) - 1
        for task in self._tasks:
            stage, microbatch = task.stage, task.microbatch
            actor = self._actors[stage]
            if task.kind == "fwd":
                if stage < last:
                    x = values[Task("fwd", stage - 1, microbatch)] if stage else tokens
                    values[task] = call(actor.forward, microbatch, x)
            elif stage == last:
                x = values[Task("fwd", stage - 1, microbatch)]
                values[task] = call(actor.loss_and_backward, microbatch, x, targets)
            else:
                values[task] = call(actor.backward, microbatch, values[Task("bwd", stage + 1, microbatch)])
        return [
            call(actor.update, *self._backwards(values, stage)) for stage, actor in enumerate(self._actors)
        ]

    def _backwards(self, values: dict[Task, Any], stage: int) -> Sequence[Any]:
        """The results for which the update of a stage has to wait; an actor runs remote calls in order."""
        return ()

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()


class Calls(_ByHand):
    """A remote call for each task; the results are references, passed on to the calls that read them."""

    def _submit(self) -> list[ray.ObjectRef]:
        tokens, targets = map(ray.put, self._batch)
        return self._calls(lambda method, *arguments: method.remote(*arguments), tokens, targets)


class CompiledGraph(_ByHand):
    """The same calls as one compiled graph: actors run their part in a loop and read and write channels.

    They look for work all the time, so the graph is taken down when it is not measured.
    """

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self._graph: Any = None

    def _compiled(self) -> Any:
        with InputNode() as batch:
            graph = MultiOutputNode(
                self._calls(lambda method, *arguments: method.bind(*arguments), batch[0], batch[1])
            )
        # By default each of the many channels takes 10 MB of Ray's memory.
        return graph.experimental_compile(
            _submit_timeout=_COMPILE_SECONDS,
            _buffer_size_bytes=_largest_message(self._workload) + _HEADER_BYTES,
            _max_inflight_executions=_IN_FLIGHT + 1,
        )

    def _backwards(self, values: dict[Task, Any], stage: int) -> Sequence[Any]:
        return [value for task, value in values.items() if task.kind == "bwd" and task.stage == stage]

    def _submit(self) -> list[Any]:
        self._graph = self._graph or self._compiled()
        return self._graph.execute(*self._batch)

    def rest(self) -> None:
        """Ends the actors' loops until there is another step."""
        if self._graph is not None:
            self._graph.teardown()
            self._graph = None

    def close(self) -> None:
        self.rest()
        super().close()


def _largest_message(workload: Workload) -> int:
    """Bytes of an activation that a stage sends, or of the tokens and targets of a step."""
    activation = workload.tokens // workload.microbatches * workload.d_model * np.float32().nbytes
    return max(activation, 2 * workload.tokens * np.int32().nbytes)
