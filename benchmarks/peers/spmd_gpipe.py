"""GPipe as one SPMD program: ``shard_map`` over the stages, activations moved by ``ppermute``.

Every device runs the same program: the layers of its stage, once in each of microbatches + stages - 1
rounds, of which some are idle. The embedding is computed everywhere, the loss on the last device.
Differentiation turns the rounds around, so all forwards come before all backwards.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import model
from benchmarks.workload import Setting, Workload


class SpmdGPipe:
    def __init__(self, setting: Setting):
        workload = setting.workload
        mesh = jax.sharding.Mesh(np.array(jax.devices()[: workload.groups]), ("stage",))
        params = _stacked(model.init_params(workload), workload)
        shardings = {name: NamedSharding(mesh, P("stage" if name == "blocks" else None)) for name in params}
        params = {name: jax.device_put(value, shardings[name]) for name, value in params.items()}
        self._state = jax.jit(lambda params: (params, model.OPTIMIZER.init(params)))(params)
        self._batch = model.batch(workload)
        self._step = jax.jit(_train_step(workload, mesh), donate_argnums=0)

    def run(self, steps: int) -> float:
        for _ in range(steps):
            self._state, loss = self._step(self._state, *self._batch)
            # Of two steps under way, one may hold the threads that the other's collectives wait for.
            jax.block_until_ready(self._state)
        return float(loss)


def _stacked(params: dict, workload: Workload) -> dict:
    """The parameters with the layers as arrays of shape (stages, layers of a stage, ...)."""
    shape = (workload.groups, workload.layers // workload.groups)
    blocks = jax.tree.map(
        lambda *leaves: np.stack(leaves).reshape(*shape, *leaves[0].shape), *params["blocks"]
    )
    return params | {"blocks": blocks}


def _train_step(workload: Workload, mesh: jax.sharding.Mesh):
    stages, rounds = workload.groups, workload.microbatches + workload.groups - 1
    ring = [(stage, (stage + 1) % stages) for stage in range(stages)]

    def loss_on_device(params: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        stage = jax.lax.axis_index("stage")
        layers = range(workload.layers // stages)
        mine = {"blocks": [jax.tree.map(lambda leaf, i=i: leaf[0, i], params["blocks"]) for i in layers]}
        embedded = model.embed(params, tokens)

        def one_round(received, index):
            x = jnp.where(stage == 0, embedded[jnp.minimum(index, workload.microbatches - 1)], received)
            y = model.apply_blocks(mine, x, workload)
            return jax.lax.ppermute(y, "stage", ring), y

        _, outputs = jax.lax.scan(one_round, jnp.zeros_like(embedded[0]), jnp.arange(rounds))
        loss = jax.lax.cond(
            stage == stages - 1,
            lambda: model.head_loss(params, outputs[stages - 1 :], targets),
            lambda: jnp.zeros(()),
        )
        return loss[None]

    def step(state: model.State, tokens: jax.Array, targets: jax.Array):
        def loss_of(params):
            specs = ({name: P("stage") if name == "blocks" else P() for name in params}, P(), P())
            losses = jax.shard_map(
                loss_on_device, mesh=mesh, in_specs=specs, out_specs=P("stage"), check_vma=False
            )
            return losses(params, tokens, targets).sum()

        loss, gradients = jax.value_and_grad(loss_of)(state[0])
        return model.updated(state, gradients), loss

    return step
