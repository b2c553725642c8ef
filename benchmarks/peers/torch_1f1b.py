"""The same model in PyTorch, by ``torch.distributed.pipelining``: 1F1B, a process per stage, gloo.

The processes import no JAX. The parameters are those of the other peers, so the losses agree.
"""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import multiprocessing, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.workload import LEARNING_RATE, WEIGHT_DECAY, Setting, Workload


class Torch1F1B:
    def __init__(self, setting: Setting):
        from benchmarks import model  # here, because the processes of the stages import this file

        self._directory = tempfile.TemporaryDirectory()
        rendezvous = (pathlib.Path(self._directory.name) / "rendezvous").as_uri()
        context = multiprocessing.get_context("spawn")
        workload = setting.workload
        batch = [part.reshape(workload.batch, workload.seq_len) for part in model.batch(workload)]
        self._connections, self._processes = [], []
        for rank in range(workload.groups):
            mine, theirs = context.Pipe()
            arguments = (theirs, setting, rank, rendezvous, model.stage_params(workload, rank), batch)
            self._processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self._processes[-1].start()
            self._connections.append(mine)

    def run(self, steps: int) -> float:
        for connection in self._connections:
            connection.send(steps)
        return [connection.recv() for connection in self._connections][-1]

    def close(self) -> None:
        for connection in self._connections:
            connection.send(0)
        for process in self._processes:
            process.join()
        self._directory.cleanup()


def _serve(connection, setting: Setting, rank: int, rendezvous: str, params: dict, batch: list) -> None:
    torch.set_num_threads(setting.share)
    workload = setting.workload
    torch.distributed.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=workload.groups
    )
    module = Stage(params, workload)
    stage = PipelineStage(module, rank, workload.groups, torch.device("cpu"))
    schedule = Schedule1F1B(stage, workload.microbatches, loss_fn=_loss)
    optimizer = torch.optim.AdamW(module.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    tokens, targets = (torch.from_numpy(part.astype("int64")) for part in batch)
    while steps := connection.recv():
        for _ in range(steps):
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(tokens)
            elif rank == workload.groups - 1:
                schedule.step(target=targets, losses=losses, return_outputs=False)
            else:
                schedule.step()
            optimizer.step()
        connection.send(float(torch.stack(losses).detach().mean()) if losses else 0.0)
    torch.distributed.destroy_process_group()


def _loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Stage(nn.Module):
    """The layers of a stage; the first one embeds tokens, the last one scores them."""

    def __init__(self, params: dict, workload: Workload):
        super().__init__()
        self.blocks = nn.ModuleList(Block(block, workload) for block in params["blocks"])
        self.embedding = self.position = self.head = None
        if "token_embedding" in params:
            self.embedding = nn.Embedding.from_pretrained(_tensor(params["token_embedding"]), freeze=False)
            self.position = nn.Parameter(_tensor(params["position_embedding"]))
        if "head" in params:
            self.head = nn.Sequential(_norm(params["head_norm"]), _linear(params["head"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x) + self.position
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, params: dict, workload: Workload):
        super().__init__()
        self.heads = workload.heads
        self.attention_norm, self.mlp_norm = _norm(params["attention_norm"]), _norm(params["mlp_norm"])
        self.qkv, self.attention_out = _linear(params["qkv"]), _linear(params["attention_out"])
        self.mlp_in, self.mlp_out = _linear(params["mlp_in"]), _linear(params["mlp_out"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq_len, d_model = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq_len, self.heads, 3, -1)
        query, key, value = qkv.permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, seq_len, d_model))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def _linear(weight: Any) -> nn.Linear:
    layer = nn.Linear(*weight.shape, bias=False)
    layer.weight = nn.Parameter(_tensor(weight.T))
    return layer


def _norm(params: dict) -> nn.LayerNorm:
    layer = nn.LayerNorm(params["scale"].shape, eps=1e-5)
    layer.weight, layer.bias = nn.Parameter(_tensor(params["scale"])), nn.Parameter(_tensor(params["bias"]))
    return layer
