"""Objects in processes of their own, so that each has the environment and the threads that it needs."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

_START_SECONDS = 300.0
_CLOSE_SECONDS = 20.0


class Host:
    """Makes an object in a new process, and calls its methods there.

    As a context manager it waits until the object exists, and ends the process.

    Args:
      factory: ``module:name`` of the object's class; only the new process imports it.
      arguments: of the factory; they are pickled, as are arguments and results of calls.
      environment: variables that the process has from its start.
      name: of the process in errors; by default the factory.
      leads: whether the processes that the new process starts end with it.
    """

    def __init__(
        self,
        factory: str,
        arguments: tuple,
        environment: Mapping[str, str],
        name: str = "",
        leads: bool = False,
    ):
        self._leads = leads
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, factory, arguments, leads), name=name or factory
        )
        with changed_environment(environment):
            self._process.start()
        theirs.close()

    def __enter__(self) -> Host:
        try:
            self.ready()
        except RuntimeError:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> None:
        """Waits until the object exists.

        Raises: ``RuntimeError`` with the traceback when the factory fails, or takes too long.
        """
        self._result(_START_SECONDS)

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Calls a method and waits for its result.

        Raises: ``RuntimeError`` with the traceback of the method's exception, or when the process dies or
          does not answer within ``timeout`` seconds.
        """
        self._connection.send((method, arguments))
        return self._result(timeout)

    def _result(self, timeout: float | None) -> Any:
        if not self._connection.poll(timeout):
            raise RuntimeError(f"{self._process.name}: not finished within {timeout:.0f} s")
        try:
            failed, result = self._connection.recv()
        except EOFError:
            self._process.join(_CLOSE_SECONDS)
            code = self._process.exitcode or 0
            cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise RuntimeError(f"{self._process.name}: {cause}") from None
        if failed:
            raise RuntimeError(f"{self._process.name} failed:\n{result}")
        return result

    def close(self) -> None:
        """Calls the object's ``close``, if it has one, and ends the process."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(_CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        if self._leads and self._process.pid:
            with contextlib.suppress(ProcessLookupError):  # no process of its group is left
                os.killpg(self._process.pid, signal.SIGKILL)
        self._connection.close()


def _serve(connection: Connection, factory: str, arguments: tuple, leads: bool) -> None:
    if leads:
        os.setsid()
    module, _, name = factory.partition(":")
    try:
        hosted = getattr(importlib.import_module(module), name)(*arguments)
    except Exception:  # the caller has to know, whatever it is
        connection.send((True, traceback.format_exc()))
        return
    connection.send((False, None))
    try:
        while (request := connection.recv()) is not None:
            method, values = request
            try:
                answer = (False, getattr(hosted, method)(*values))
            except Exception:
                answer = (True, traceback.format_exc())
            connection.send(answer)
    except (EOFError, BrokenPipeError):
        pass  # the caller has ended
    finally:
        if hasattr(hosted, "close"):
            hosted.close()


@contextlib.contextmanager
def changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process, which the processes that it starts inherit, and restores them."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
