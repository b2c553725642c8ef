"""Published steps on GPUs, typed in from papers and pages. Each table names its source."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.facts import Fact, Model

TORCHTITAN = "torchtitan, Llama with FSDP"

# Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
# arXiv:2104.04473, table 1: heads, width, layers, tensor, pipeline, devices, batch, teraFLOP/s of a device.
_MEGATRON = (
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (32, 3072, 30, 2, 1, 64, 512, 138),
    (32, 4096, 36, 4, 1, 128, 512, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 138),
    (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148),
    (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 163),
)

# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, arXiv:2205.05198,
# tables 3 and 5: heads, width, layers, pipeline, chunks, batch, microbatch, seconds with full recomputation.
_RECOMPUTATION = (
    (64, 6144, 48, 1, 1, 4, 4, 1.42),
    (96, 12288, 96, 8, 3, 64, 1, 18.13),
    (128, 20480, 105, 35, 3, 280, 1, 49.05),
    (160, 25600, 128, 64, 1, 512, 1, 94.42),
)

LLAMA_3_8B = Model(32, 4096, 32, 8192, 128256, 8, 14336, True, "flash", True)
LLAMA_3_70B = Model(80, 8192, 64, 8192, 128256, 8, 28672, True, "flash", True)
_LLAMA_2_13B = Model(40, 5120, 40, 4096, 32000, 40, 13824, True, "flash", True)
LLAMA_2_70B = Model(80, 8192, 64, 4096, 32000, 8, 28672, True, "flash", True)

# torchtitan, docs/performance.md of 2024 (64 A100) and benchmarks/llama3_h100_202412_torchtitan.md (8 and 128
# H100): device, model, devices, rows of a device, tokens per second of a device, recomputed share. "Selective
# layer" recomputes every second layer; "selective op" keeps every second product: a quarter of the forward.
_TORCHTITAN = (
    ("a100", LLAMA_3_8B, 64, 1, 2904, 0.5),
    ("a100", LLAMA_3_8B, 64, 1, 2973, 0.5),
    ("a100", LLAMA_3_70B, 64, 1, 331, 1.0),
    ("a100", _LLAMA_2_13B, 64, 2, 2162, 0.0),
    ("a100", _LLAMA_2_13B, 64, 2, 1914, 0.5),
    ("a100", _LLAMA_2_13B, 64, 2, 1904, 0.5),
    ("a100", LLAMA_2_70B, 64, 1, 355, 0.5),
    ("a100", LLAMA_2_70B, 64, 2, 353, 1.0),
    ("h100", LLAMA_3_8B, 8, 2, 5762, 0.5),
    ("h100", LLAMA_3_8B, 8, 2, 6667, 0.5),
    ("h100", LLAMA_3_8B, 128, 2, 5605, 0.5),
    ("h100", LLAMA_3_8B, 128, 2, 6514, 0.5),
)


# NVIDIA NeMo AutoModel, docs/performance-summary.md (April 2026), mixtures on one node of eight H100: model,
# rows of a step and of a microbatch, seconds. Weights are divided over all devices, of Qwen3 also by experts.
# Assumed: nothing is computed again, and all layers attend to all tokens, though half of GPT-OSS's do not.
MIXTURES = "NeMo AutoModel, mixtures with FSDP"
_AUTOMODEL = (
    (Model(48, 2048, 32, 4096, 151936, 4, 768, True, "flash", True, 128, 128, 8), 512, 4, 21.773),
    (Model(24, 2880, 64, 4096, 201088, 8, 2880, True, "flash", True, 64, 32, 4), 256, 2, 10.04),
)


def steps_of_gpus() -> Iterator[Fact]:
    """The steps of all tables."""
    yield from _megatron()
    yield from _recomputation()
    yield from _torchtitan()
    for model, batch, rows, seconds in _AUTOMODEL:
        yield Fact(MIXTURES, "h100-sxm", model, 8, batch, rows, 1, 8, 1, seconds, recomputed=0.0, fsdp=True)


def _megatron() -> Iterator[Fact]:
    """The times follow from the rates by equation 3 of the paper, which counts full recomputation."""
    for heads, width, layers, tensor, pipeline, devices, batch, teraflops in _MEGATRON:
        model = Model(layers, width, heads, 2048)
        tokens = batch * model.length
        share = 1 + model.length / (6 * width) + model.vocabulary / (16 * layers * width)
        seconds = 96 * tokens * layers * width**2 * share / (devices * teraflops * 1e12)
        chunks = next(
            (chunks for chunks in (2, 3) if pipeline > 1 and layers // pipeline % chunks == 0),
            1,
        )
        data = devices // tensor // pipeline
        yield Fact(
            "Megatron-LM, 1.7B to 1T",
            "a100",
            model,
            devices,
            batch,
            0 if pipeline == 1 else 1,
            tensor,
            data,
            pipeline,
            seconds,
            chunks,
        )


def _recomputation() -> Iterator[Fact]:
    for heads, width, layers, pipeline, chunks, batch, microbatch, seconds in _RECOMPUTATION:
        model = Model(layers, width, heads, 2048)
        yield Fact(
            "full recomputation, 22B to 1T",
            "a100",
            model,
            8 * pipeline,
            batch,
            microbatch,
            8,
            1,
            pipeline,
            seconds,
            chunks,
        )


def _torchtitan() -> Iterator[Fact]:
    for device, model, devices, rows, tokens_per_second, recomputed in _TORCHTITAN:
        yield Fact(
            TORCHTITAN,
            device,
            model,
            devices,
            rows * devices,
            rows,
            1,
            devices,
            1,
            rows * model.length / tokens_per_second,
            recomputed=recomputed,
            fsdp=True,
        )
