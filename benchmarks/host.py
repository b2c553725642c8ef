"""Objects in processes of their own, so that each peer has the environment and the threads that it needs."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

_START_SECONDS = 300.0
_CLOSE_SECONDS = 20.0


class Host:
    """Makes an object in a new process, and calls its methods there.

    Args:
      factory: what makes the object, ``module:name``; imported in the new process alone.
      arguments: of the factory; they are pickled, as are those of calls, and results.
      environment: variables that the process has from its start.
      name: of the process in errors; by default the factory.
    """

    def __init__(self, factory: str, arguments: tuple, environment: Mapping[str, str], name: str = ""):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, factory, arguments), name=name or factory
        )
        with _environment(environment):
            self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Waits until the object is made.

        Raises: ``RuntimeError`` when it could not be, with the traceback, or takes too long.
        """
        if not self._connection.poll(_START_SECONDS):
            raise RuntimeError(f"{self._process.name} did not start within {_START_SECONDS:g} s")
        self._result()

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method and waits. Raises ``RuntimeError`` with the traceback of what it raised there."""
        self._connection.send((method, arguments))
        return self._result()

    def _result(self) -> Any:
        try:
            failed, result = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"{self._process.name}: its process died") from None
        if failed:
            raise RuntimeError(f"{self._process.name} failed:\n{result}")
        return result

    def close(self) -> None:
        """Calls the object's ``close`` and ends the process."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(_CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


def _serve(connection: Connection, factory: str, arguments: tuple) -> None:
    module, _, name = factory.partition(":")
    try:
        hosted = getattr(importlib.import_module(module), name)(*arguments)
    except Exception:  # whatever it is, the one who asked has to know
        connection.send((True, traceback.format_exc()))
        return
    connection.send((False, None))
    with contextlib.closing(hosted), contextlib.suppress(EOFError):  # no one is left to ask
        while (request := connection.recv()) is not None:
            method, values = request
            try:
                answer = (False, getattr(hosted, method)(*values))
            except Exception:
                answer = (True, traceback.format_exc())
            connection.send(answer)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
