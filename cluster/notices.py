"""Keeps from the user what Ray says of a Ray that is started for them, where all is as it should be."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_EXPECTED = (
    ("ray._private.worker", "Started a local Ray instance"),
    ("ray._private.authentication.authentication_token_setup", "Token authentication is enabled"),
)
"""Ray's loggers, and how the messages begin that say that all is well."""


@contextlib.contextmanager
def without_notices() -> Iterator[None]:
    """Within it, messages of Ray that all is as expected are not shown; all others are."""
    with contextlib.ExitStack() as undo:
        for name, beginning in _EXPECTED:
            undo.enter_context(_without(logging.getLogger(name), beginning))
        yield


@contextlib.contextmanager
def _without(logger: logging.Logger, beginning: str) -> Iterator[None]:
    def is_shown(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginning)

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
