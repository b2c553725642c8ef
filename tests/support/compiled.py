"""Compiled code that the processes of a run share, and that is kept between runs.

JAX writes an entry of its cache in place, so another process may read half of one. Each process therefore has
a directory of its own, and hands its entries on by hard links, which appear whole or not at all.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

VARIABLE = "MPMD_TEST_CACHE"
"""Names the directory to keep compiled code in; where it is empty, nothing is kept between runs."""

MOST_BYTES = 2 * 2**30
DAY = 24 * 60 * 60


def _machine() -> str:
    """What code is compiled for: releases, flags of XLA, and the instructions of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    described = [version("jax"), version("jaxlib"), os.environ.get("XLA_FLAGS", ""), *processor]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]


class CompiledCode(contextlib.AbstractContextManager):
    """This process's directory of compiled code, and the one that all processes share.

    Attributes:
      directory: for JAX to read and write, of this process alone; removed at the end.
    """

    def __init__(self):
        usual = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mpmd-tests"
        named = os.environ.get(VARIABLE, str(usual))
        self._temporary = None if named else tempfile.mkdtemp()
        root = Path(named or self._temporary)
        self._shared = root / _machine()
        self._shared.mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix="process-", dir=root))
        self._known: set[str] = set()
        self._drop_old(root)

    def fetch(self) -> None:
        """Links the entries that other processes have published since the last time."""
        self._link(self._shared, self.directory)

    def publish(self) -> None:
        """Links the entries that this process has written since the last time."""
        self._link(self.directory, self._shared)

    def _link(self, source: Path, target: Path) -> None:
        for name in {entry.name for entry in os.scandir(source)} - self._known:
            # Another process may have published the same entry, or dropped it as an old one.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(source / name, target / name)
            self._known.add(name)

    def _drop_old(self, root: Path) -> None:
        """Removes directories that killed processes left, and the oldest entries if all are too large."""
        entries = []
        for folder in root.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process ends, or drops old entries, too
                if not folder.name.startswith("process-"):
                    for entry in folder.glob("*-cache"):
                        entries.append((entry.stat().st_mtime, entry.stat().st_size, entry))
                elif time.time() - folder.stat().st_mtime > DAY:
                    shutil.rmtree(folder, ignore_errors=True)
        excess = sum(size for _, size, _ in entries) - MOST_BYTES
        for _, size, entry in sorted(entries):
            if excess <= 0:
                break
            entry.unlink(missing_ok=True)
            excess -= size

    def __exit__(self, *_):
        shutil.rmtree(self._temporary or self.directory, ignore_errors=True)
