"""The keywords of ``mpmd.jit``, and a substitute for each keyword of ``jax.jit`` that it does not take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mpmd.validation import Fault, names_faults, positions_faults

_INSTEAD = {
    "keep_unused": "leaves that the step does not read are never sent, and a donated one is still given up",
    "device": "the groups' devices are those of mpmd_mesh",
    "backend": "the groups' devices are those of mpmd_mesh; mpmd.launch(platform=...) chooses their kind",
    "inline": "calls within the step are inlined anyway",
    "abstracted_axes": "the step compiles for each shape that it is called with",
    "compiler_options": "give XLA's options to the groups' processes in XLA_FLAGS: in the environment, or "
    'with mpmd.launch(runtime_env={"env_vars": {"XLA_FLAGS": ...}})',
    "axis_resources": "use in_shardings and out_shardings",
    "mesh": "the mesh of groups is mpmd_mesh",
}
"""The substitutes of keywords of ``jax.jit``, and of names that users may take for ours."""


def check_keywords(keywords: Mapping[str, Any]) -> None:
    if keywords:
        raise TypeError(
            "\n".join(
                f"mpmd.jit takes no {name!r}: {_INSTEAD[name]}"
                if name in _INSTEAD
                else f"mpmd.jit got an unexpected keyword argument {name!r}"
                for name in keywords
            )
        )


def specs_or_shardings(which: str, specs: Any, shardings: Any) -> Any:
    """Returns ``shardings`` or ``specs``, two names of one argument, whichever is given.

    Raises: ``ValueError`` when both are given; ``which`` is ``"in"`` or ``"out"``.
    """
    if specs is not None and shardings is not None:
        raise ValueError(
            f"{which}_specs and {which}_shardings are two names for the same: leave out one of them"
        )
    return shardings if specs is None else specs


def argument_faults(**parameters: Any) -> Iterator[Fault | None]:
    """The faults of positions (``..._argnums``) and names (``..._argnames``) of arguments."""
    for name, value in parameters.items():
        if value is not None:
            yield from positions_faults(name, value) if name.endswith("nums") else names_faults(name, value)
