"""The pipeline as one would write it on Ray: an actor per stage, and its tasks as calls of its methods."""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray
from ray.dag import InputNode, MultiOutputNode

import mpmd
from benchmarks import model
from benchmarks.peers import cpu_environment
from benchmarks.workload import Setting, Workload
from mpmd.ir.plan import Task
from mpmd.schedules import total_order

_IN_FLIGHT = 2
"""Steps submitted at a time."""

_COMPILE_SECONDS = 240.0
"""The seconds that a step may take: by default graphs give up after 10 s, and the first step compiles."""

_HEADER_BYTES = 2**14
"""The bytes that a message may have besides its arrays."""


class Stage:
    """A stage on an actor: its parameters, their optimizer, and what the backwards need of the forwards.

    The last stage computes the loss and its gradient in one go, after which it has no backward.
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
        y, self._pullbacks[microbatch] = self._forward(self._state[0], x)
        return np.asarray(y)

    def forward_of(self, microbatch: int, xs: np.ndarray) -> np.ndarray:
        """``forward`` of a microbatch of a whole batch."""
        return self.forward(microbatch, xs[microbatch])

    def loss_and_backward(self, microbatch: int, x: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """The last stage's forward and backward; ``targets`` are of the whole batch."""
        self._sums, dx = self._loss(self._state[0], x, self._sums, targets[microbatch])
        return np.asarray(dx)

    def backward(self, microbatch: int, dy: np.ndarray) -> np.ndarray | None:
        pullback = self._pullbacks.pop(microbatch)
        self._sums, dx = self._backward(pullback, self._sums, dy)
        return np.asarray(dx[0]) if dx else None

    def update(self, *after: Any) -> float:
        """Takes a step of the optimizer; the result is the loss on the last stage, elsewhere 0."""
        self._state, loss = self._update(self._state, self._sums)
        self._sums = self._zeros(self._state[0])
        return float(loss)


class _ByHand(abc.ABC):
    """The actors, and the tasks of all groups in an order in which they may be submitted."""

    def __init__(self, setting: Setting):
        self._workload = workload = setting.workload
        ray.init(address=setting.ray_address, log_to_driver=False)
        environment = {"env_vars": cpu_environment(1, setting.share)}
        stage = ray.remote(num_cpus=0, runtime_env=environment)(Stage)
        self._actors: list[Any] = [stage.remote(workload, i) for i in range(workload.groups)]
        self._batch = model.batch(workload)
        schedule = mpmd.Std1F1B(workload.groups)
        order = total_order(schedule.tasks(workload.microbatches))
        self._tasks = [task for _, cell in order for task in cell.tasks]
        self._last = workload.groups - 1

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

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()


class Calls(_ByHand):
    """A remote call for each task; the results are references, passed on to the calls that read them."""

    def _submit(self) -> list[ray.ObjectRef]:
        tokens, targets = map(ray.put, self._batch)
        values: dict[Task, ray.ObjectRef] = {}
        for task in self._tasks:
            kind, stage, microbatch = task.kind, task.stage, task.microbatch
            actor = self._actors[stage]
            if kind == "fwd":
                if stage == 0:
                    values[task] = actor.forward_of.remote(microbatch, tokens)
                elif stage < self._last:
                    x = values.pop(Task("fwd", stage - 1, microbatch))
                    values[task] = actor.forward.remote(microbatch, x)
            elif stage == self._last:
                x = values.pop(Task("fwd", stage - 1, microbatch))
                values[task] = actor.loss_and_backward.remote(microbatch, x, targets)
            else:
                dy = values.pop(Task("bwd", stage + 1, microbatch))
                values[task] = actor.backward.remote(microbatch, dy)
        return [actor.update.remote() for actor in self._actors]


class CompiledGraph(_ByHand):
    """The same calls as one compiled graph: actors run their part in a loop and read and write channels.

    They look for work all the time, so the graph is taken down when it is not measured.
    """

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self._graph: Any = None

    def _compiled(self) -> Any:
        with InputNode() as batch:
            values: dict[Task, Any] = {}
            for task in self._tasks:
                kind, stage, microbatch = task.kind, task.stage, task.microbatch
                actor = self._actors[stage]
                before = values.get(Task("fwd", stage - 1, microbatch))
                if kind == "fwd":
                    if stage == 0:
                        values[task] = actor.forward_of.bind(microbatch, batch[0])
                    elif stage < self._last:
                        values[task] = actor.forward.bind(microbatch, before)
                elif stage == self._last:
                    values[task] = actor.loss_and_backward.bind(microbatch, before, batch[1])
                else:
                    dy = values[Task("bwd", stage + 1, microbatch)]
                    values[task] = actor.backward.bind(microbatch, dy)
            graph = MultiOutputNode(
                [
                    actor.update.bind(
                        *(v for task, v in values.items() if task.kind == "bwd" and task.stage == i)
                    )
                    for i, actor in enumerate(self._actors)
                ]
            )
        # Unless told, each of the many channels takes 10 MB of Ray's memory.
        return graph.experimental_compile(
            _submit_timeout=_COMPILE_SECONDS,
            _buffer_size_bytes=_largest_message(self._workload) + _HEADER_BYTES,
            _max_inflight_executions=_IN_FLIGHT + 1,
        )

    def _submit(self) -> list[Any]:
        self._graph = self._graph or self._compiled()
        return self._graph.execute(*self._batch)

    def rest(self) -> None:
        """Ends what the actors do until there is another step."""
        if self._graph is not None:
            self._graph.teardown()
            self._graph = None

    def close(self) -> None:
        self.rest()
        super().close()


def _largest_message(workload: Workload) -> int:
    """Bytes of what a stage sends, or of the tokens and targets of a step."""
    activation = workload.tokens // workload.microbatches * workload.d_model * np.float32().nbytes
    return max(activation, 2 * workload.tokens * np.int32().nbytes)
