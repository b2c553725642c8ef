"""The source code of Python's standard library as a stream of bytes to train on."""

import hashlib
import math
import pathlib
import sysconfig

import numpy as np


def standard_library() -> tuple[np.ndarray, np.ndarray]:
    """The training and validation text, each uint8[num_bytes].

    About one file in twenty is for validation, chosen by a hash of its path, so that the split is the
    same on every machine and no file is in both.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    splits = {"train": [], "validation": []}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in ("site-packages", "dist-packages"):
            continue  # installed by the user: not the standard library
        digest = hashlib.sha256(relative.as_posix().encode()).digest()
        splits["validation" if digest[0] < 13 else "train"].append(path.read_bytes())
    train, validation = (np.frombuffer(b"\n".join(files), np.uint8) for files in splits.values())
    return train, validation


def random_batch(text: np.ndarray, shape: tuple[int, ...], seed: int, step: int):
    """Random windows of ``text``: tokens and, one byte later, targets; each int32[*shape].

    The last entry of ``shape`` is the length of a window. The batch is a function of ``(seed, step)``
    alone, so a run that resumes at some step reads what it would have read.
    """
    return windows_at_random(text, shape, np.random.default_rng((seed, step)))


def windows_at_random(text: np.ndarray, shape: tuple[int, ...], rng: np.random.Generator):
    """The windows that ``rng`` draws next: tokens and targets as those of ``random_batch``."""
    *batch_shape, seq_len = shape
    starts = rng.integers(len(text) - seq_len, size=batch_shape)
    return _windows(text, starts, seq_len)


def evenly_spaced(text: np.ndarray, shape: tuple[int, ...]):
    """Windows that sample the whole of ``text``: tokens and targets as those of ``random_batch``."""
    *batch_shape, seq_len = shape
    starts = np.linspace(0, len(text) - seq_len - 1, math.prod(batch_shape)).astype(np.int64)
    return _windows(text, starts.reshape(batch_shape), seq_len)


def _windows(text: np.ndarray, starts: np.ndarray, seq_len: int):
    windows = text[starts[..., None] + np.arange(seq_len + 1)].astype(np.int32)
    return windows[..., :-1], windows[..., 1:]
