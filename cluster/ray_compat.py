"""The differences between releases of Ray, and the parts of Ray that have no public name."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import ray
from packaging.version import Version
from ray.actor import ActorHandle

OLDEST, NEWEST = Version("2.54"), Version("2.60")
"""The releases of Ray, by their first two numbers, between which ``make test-versions`` runs the tests."""

_MESSAGES_TO_USER = (
    ("ray._private.worker", "Started a local Ray instance"),
    ("ray._private.authentication.authentication_token_setup", "Token authentication is enabled"),
)

_COMING_DEFAULT = "Tip: In future versions of Ray"
"""So begins a ``FutureWarning`` of releases before 2.60 whenever Ray starts. Nothing here depends on it."""


def check_release(release: str = ray.__version__) -> None:
    version = Version(release)
    if version < OLDEST:
        raise RuntimeError(
            f"Ray {release} is too old: mpmd needs Ray {OLDEST} or later. Install it on all nodes, "
            f"pip install 'ray[default]>={OLDEST}'"
        )
    if version.release[:2] > NEWEST.release:
        warnings.warn(
            f"Ray {release} is newer than {NEWEST}, the newest release that this mpmd was tested with; "
            "`mpmd doctor` tries it",
            stacklevel=2,
        )


def draining_nodes() -> frozenset[str]:
    """The nodes that are to end, as Ray was told: by ``ray drain-node``, an autoscaler, or SIGTERM.

    Ray has no public function for it; Ray Train and Ray Serve call the same one.
    """
    return frozenset(ray._private.state.state.get_draining_nodes())


def actor_is_dead(actor: str) -> bool:
    """Whether an actor has died for good, by its identifier; one that Ray does not know any more has.

    Ray's public function for it asks the dashboard, which need not be there.
    """
    return ray._private.state.actors(actor).get("State", "DEAD") == "DEAD"


def progress_of(actor: ActorHandle) -> str:
    known = ray._private.state.actors(actor._actor_id.hex())
    if not known.get("Pid"):
        return "queued, and Ray has started no process for it yet"
    doing = "takes its devices, or connects" if known["State"] == "ALIVE" else "imports JAX"
    return f"process {known['Pid']} {doing}"


def log_directory() -> str:
    """Ray keeps its logs in a directory with the same name on all nodes."""
    node: Any = ray._private.worker._global_node
    return node.get_logs_dir_path()


@contextlib.contextmanager
def without_messages_to_user() -> Iterator[None]:
    """Hides, while this process connects with Ray, the messages of Ray that all is as expected."""
    with contextlib.ExitStack() as undo:
        for name, beginning in _MESSAGES_TO_USER:
            undo.enter_context(_without(logging.getLogger(name), beginning))
        undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", _COMING_DEFAULT, FutureWarning)
        # JAX warns of forks; Ray's forks are harmless, because another program is started in them.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
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
