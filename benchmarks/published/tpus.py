"""Published steps of MaxText on TPUs, typed in from its tables and from logs of recipes.

A line is one step of one slice, whose chips ICI joins. The batch of a replica is one microbatch. Two things
are assumed: to move kept values to the host and back takes no time, as computing hides it, and what nobody
reads is not computed again.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.facts import Fact, Model
from benchmarks.published.gpus import LLAMA_2_70B, LLAMA_3_8B, LLAMA_3_70B

TPUS = ("v5e", "v5p", "v6e")
MAXTEXT = {device: f"MaxText, TPU {device}" for device in TPUS}


def _default(scale: tuple[int, int, int]) -> Model:
    """MaxText's own model, whose width, heads with hidden units, and layers are multiples."""
    width, heads, layers = scale
    return Model(
        layers=16 * layers,
        width=2048 * width,
        heads=16 * heads,
        head=128,
        length=2048,
        vocabulary=32000,
        hidden=7168 * heads,
        gated=True,
        attention="flash",
        float32_weights=True,
    )


# The scales of 16 to 1024 billion parameters, by ``get_individual_scales`` of ``configs/types.py``.
_16B, _32B, _64B = _default((2, 4, 2)), _default((4, 4, 2)), _default((4, 4, 4))
_128B, _256B, _512B = _default((4, 8, 4)), _default((8, 8, 4)), _default((8, 8, 8))
_1024B = _default((8, 16, 8))
_LLAMA_3_405B = Model(126, 16384, 128, 8192, 128256, 8, 53248, True, "flash", True)
_MISTRAL_7B = Model(32, 4096, 32, 8192, 32000, 8, 14336, True, "flash", True)
_GPT_3 = Model(96, 12288, 96, 2048, 50304, attention="flash", float32_weights=True)

# What a forward keeps by ``remat_policy``, as ``layers/decoders.py`` has it.
_FULL, _MINIMAL, _QKV, _QKV_OUT = (), ("qkv", "out", "up"), ("qkv",), ("qkv", "out")

# github.com/AI-Hypercomputer/maxtext at e591f30c (August 2026), src/maxtext/configs/tpu/v5e/README.md and
# v5p/README.md, lines of one slice, with the settings of the scripts beside them: model, chips, rows of a
# chip, tensor, kept, teraFLOP/s of a chip. They count all scores, also masked ones.
_TABLES = (
    ("v5e", _16B, 256, 6, 1, _FULL, 120),
    ("v5e", _32B, 256, 4, 1, _FULL, 132),
    ("v5e", _64B, 256, 2, 1, _FULL, 118),
    ("v5e", _128B, 256, 1, 16, _QKV, 110),
    ("v5p", _32B, 64, 6, 4, _MINIMAL, 328),
    ("v5p", _64B, 64, 3, 4, _MINIMAL, 323),
    ("v5p", _128B, 128, 1, 8, _MINIMAL, 315),
    ("v5p", _128B, 256, 1, 8, _MINIMAL, 316),
    ("v5p", _256B, 512, 1, 8, _MINIMAL, 308),
    ("v5p", _512B, 512, 2, 8, _FULL, 294),
    ("v5p", _1024B, 1024, 2, 16, _FULL, 254),
    ("v5p", _1024B, 2048, 2, 16, _FULL, 297),
)

# github.com/AI-Hypercomputer/tpu-recipes at c8cfe2f6 (August 2026), README.md of training/trillium and of
# training/v5p/Llama3.1-405B-MaxText, steps of one slice: model, chips, rows of a chip, kept, seconds. The
# rows are those of the logs (``total_weights``), which are the settings' but for Llama 2.
_RECIPES = (
    ("v6e", LLAMA_3_8B, 8, 3, _QKV_OUT, 3.443),
    ("v6e", LLAMA_3_8B, 16, 3, _QKV_OUT, 3.393),
    ("v6e", LLAMA_3_8B, 32, 3, _QKV_OUT, 3.495),
    ("v6e", LLAMA_3_8B, 64, 5, _QKV_OUT, 5.652),
    ("v6e", LLAMA_3_8B, 128, 4, _QKV_OUT, 4.602),
    ("v6e", LLAMA_3_8B, 256, 4, _QKV_OUT, 4.546),
    ("v6e", LLAMA_3_70B, 32, 2, _QKV, 17.790),
    ("v6e", LLAMA_3_70B, 64, 2, _QKV, 18.688),
    ("v6e", LLAMA_3_70B, 128, 4, _QKV, 34.786),
    ("v6e", LLAMA_3_70B, 256, 5, _QKV, 42.656),
    ("v6e", LLAMA_2_70B, 256, 2, _QKV, 9.052),
    ("v6e", _MISTRAL_7B, 8, 6, _QKV_OUT, 6.320),
    ("v6e", _GPT_3, 256, 3, _FULL, 17.182),
    ("v5p", _LLAMA_3_405B, 512, 2, ("attention",), 131.474),
)


def steps_of_tpus() -> Iterator[Fact]:
    """The steps of all tables."""
    for device, model, chips, rows, tensor, kept, teraflops in _TABLES:
        seconds = rows * _published_operations(model) / (1e12 * teraflops)
        yield _fact(device, model, chips, rows, tensor, kept, seconds)
    for device, model, chips, rows, kept, seconds in _RECIPES:
        yield _fact(device, model, chips, rows, 1, kept, seconds)


def _fact(
    device: str, model: Model, chips: int, rows: int, tensor: int, kept: tuple[str, ...], seconds: float
) -> Fact:
    return Fact(
        group=MAXTEXT[device],
        device=device,
        model=model,
        devices=chips,
        batch=rows * chips,
        microbatch=rows * tensor,
        tensor=tensor,
        data=chips // tensor,
        pipeline=1,
        seconds=seconds,
        recomputed=_computed_again(model, kept),
        fsdp=True,
        slices=1,
    )


def _weights(model: Model) -> dict[str, int]:
    """The weights of a block's products."""
    of_queries = model.heads * model.head_size
    of_keys = (model.key_heads or model.heads) * model.head_size
    hidden = model.hidden or 4 * model.width
    return {
        "qkv": model.width * (of_queries + 2 * of_keys),
        "out": of_queries * model.width,
        "up": (1 + model.gated) * model.width * hidden,
        "down": hidden * model.width,
    }


def _published_operations(model: Model) -> float:
    """The operations of a row, as MaxText counted them before July 2025: with masked scores."""
    scores = 2 * model.length * model.heads * model.head_size
    weights = model.layers * (sum(_weights(model).values()) + scores) + model.width * model.vocabulary
    return 6.0 * model.length * weights


def _computed_again(model: Model, kept: tuple[str, ...]) -> float:
    """The share of a block's forward that the backward computes again; nothing reads what ``down`` gives."""
    work = {**_weights(model), "attention": model.length * model.heads * model.head_size}
    return sum(work[name] for name in work if name not in (*kept, "down")) / sum(work.values())
