"""The durations of phases, such as the passes of a compilation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass
class Stopwatch:
    """Adds up the seconds of named phases.

    A phase that runs within another counts for itself alone, so the seconds add up to the time that passed::

        watch = Stopwatch()
        with watch("trace"):
            ...
            with watch("jax"):
                ...
        watch.seconds  # {"trace": 0.2, "jax": 1.1}
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.seconds.setdefault(name, 0.0)
        before = self._unaccounted()
        try:
            yield
        finally:
            self.seconds[name] += self._unaccounted() - before

    def timed(self, name: str, fun: Callable) -> Callable:
        @functools.wraps(fun)
        def call(*args, **kwargs):
            with self(name):
                return fun(*args, **kwargs)

        return call

    def _unaccounted(self) -> float:
        return time.perf_counter() - sum(self.seconds.values())
