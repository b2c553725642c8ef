"""The differences between releases of Ray, and the parts of Ray that have no public name."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray._private.services
import ray.experimental.internal_kv
from packaging.version import Version
from ray._private.authentication import authentication_token_setup
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.actor import ActorHandle

OLDEST, NEWEST = Version("2.54"), Version("2.60")
"""The releases of Ray, by their first two numbers, between which ``make test-versions`` runs the tests."""

_MESSAGES_TO_USER = (
    ("ray._private.worker", "Started a local Ray instance"),
    ("ray._private.authentication.authentication_token_setup", "Token authentication is enabled"),
)
"""Ray's loggers, and how the messages begin that say that all is well."""

_COMING_DEFAULT = "Tip: In future versions of Ray"
"""So begins a ``FutureWarning`` of releases before 2.60 whenever Ray starts. Nothing here depends on it."""


def check_release(release: str = ray.__version__) -> None:
    """Compares a release of Ray with those that are supported.

    A newer release than the newest that was tried is a ``UserWarning``.

    Raises: ``RuntimeError`` for a release that is too old.
    """
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
    """The progress of an actor's start, in Ray's eyes, for people."""
    known = ray._private.state.actors(actor._actor_id.hex())
    if not known.get("Pid"):
        return "queued, and Ray has started no process for it yet"
    doing = "takes its devices, or connects" if known["State"] == "ALIVE" else "imports JAX"
    return f"process {known['Pid']} {doing}"


def log_directory() -> str:
    """The directory of Ray's logs, which has the same name on all nodes."""
    node: Any = ray._private.worker._global_node
    return node.get_logs_dir_path()


StoreError = ray.exceptions.RayError
"""Ray's store cannot be reached, or does not let this process in."""


class KeyValueStore:
    """Ray's store of small values, of one cluster: bytes by name, in a namespace of this project.

    Ray's own parts leave their status there; ``ray status`` reads it as ``at`` does. It has no public name.
    Whoever wants to reach it has to be let in by Ray, with a token where the cluster has one.

    Args:
      client: Ray's, which has no public type.

    Raises: all methods ``StoreError`` where the cluster does not answer.
    """

    _NAMESPACE = b"mpmd"
    _SECONDS = 5.0

    def __init__(self, client: Any):
        self._client = client

    @classmethod
    def of_driver(cls) -> KeyValueStore:
        """The store of the cluster that this process is connected with."""
        return cls(ray.experimental.internal_kv.internal_kv_get_gcs_client())

    @classmethod
    def at(cls, address: str) -> KeyValueStore:
        """The store of the cluster at ``host:port``, which this process need not be connected with."""
        return cls(GcsClient(address=address))

    def put(self, name: str, value: bytes) -> None:
        """Stores a value, in place of an earlier one."""
        self._client.internal_kv_put(name.encode(), value, True, self._NAMESPACE, timeout=self._SECONDS)

    def get(self, name: str) -> bytes | None:
        """The value of a name, if there is one."""
        return self._client.internal_kv_get(name.encode(), self._NAMESPACE, timeout=self._SECONDS)

    def delete(self, name: str) -> None:
        """Drops a value, if it is there."""
        self._client.internal_kv_del(name.encode(), False, self._NAMESPACE, timeout=self._SECONDS)

    def names(self, beginning: str) -> list[str]:
        """The names that begin so."""
        names = self._client.internal_kv_keys(beginning.encode(), self._NAMESPACE, timeout=self._SECONDS)
        return [name.decode() for name in names]

    def ended_jobs(self) -> frozenset[str]:
        """The jobs of the cluster whose drivers have ended, in Ray's words."""
        jobs = self._client.get_all_job_info(timeout=self._SECONDS)
        return frozenset(job.hex() for job, info in jobs.items() if info.is_dead)


def use_token() -> None:
    """Has Ray show this user's token to clusters, if there is one and ``RAY_AUTH_MODE`` does not forbid it.

    ``ray.init`` and ``ray status`` do the same, in the releases of Ray that have tokens by default.
    """
    enable = getattr(authentication_token_setup, "maybe_enable_token_auth_if_token_available", None)
    if enable is not None:
        enable(warn_if_disabled=False)


def clusters_here(address: str | None) -> list[str]:
    """The addresses, ``host:port``, of the clusters to look at.

    Args:
      address: the one to look at, as ``ray.init`` takes it. With ``None`` it is that of ``RAY_ADDRESS``, or
        else all clusters to which this user's processes on this machine belong. With those of others, Ray's
        token would get to them.

    Raises: ``ValueError`` for an address of another form.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        found = ray._private.services.canonicalize_bootstrap_address(address)
        return [found] if found else []
    return sorted({address for process in Path("/proc").glob("[0-9]*") for address in _clusters_of(process)})


def _clusters_of(process: Path) -> list[str]:
    """The cluster that a process of this user belongs to, if it is Ray's of a node."""
    try:
        if process.stat().st_uid != os.getuid():
            return []
        program, *arguments = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended meanwhile
        return []
    if os.path.basename(program) != "raylet":
        return []
    return [each.partition("=")[2] for each in arguments if each.startswith("--gcs-address=")]


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
