"""Says which discrete choices forwards keep for their backwards, and which choices backwards make again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jax.extend.core import Jaxpr, JaxprEqn

from mpmd.compiler.jaxprs.choices import KEPT, MOST, RECOMPUTED, choice_bytes, choice_name
from mpmd.compiler.jaxprs.equations import subjaxprs
from mpmd.explanation.provenance import lines_of
from mpmd.util.tables import first_few, human_bytes

Jaxprs = Mapping[str, Jaxpr]
"""The equations of tasks, by the task without its microbatch, such as ``fwd_0``."""


def kept_choices(jaxprs: Jaxprs) -> Iterator[str]:
    for task, nbytes, lines in _choices(jaxprs, KEPT):
        yield (
            f"{task} keeps {nbytes} of discrete choices, such as the indices of top_k, so that its backward "
            f"makes no others when it computes a function under jax.checkpoint again: {lines}"
        )


def recomputed_choices(jaxprs: Jaxprs) -> Iterator[str]:
    for task, nbytes, lines in _choices(jaxprs, RECOMPUTED):
        yield (
            f"the backward of {task} makes {nbytes} of discrete choices again, which may differ from the "
            f"forward's by rounding: {lines}. They are more than {MOST:.0%} of the bytes that their function "
            "under jax.checkpoint returns: put jax.checkpoint around a whole layer, or have its policy keep "
            "them by a name of jax.ad_checkpoint.checkpoint_name"
        )


def _choices(jaxprs: Jaxprs, name: str) -> Iterator[tuple[str, str, str]]:
    """Yields the forwards with choices of a name, the bytes of the choices, and the user's lines."""
    for task, jaxpr in jaxprs.items():
        if "fwd_" in task and (nbytes := choice_bytes(jaxpr, name)):
            lines = dict.fromkeys(str(line) for eqn in _naming(jaxpr, name) for line in lines_of(eqn))
            yield task, human_bytes(nbytes), first_few(lines)


def _naming(jaxpr: Jaxpr, name: str) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if choice_name(eqn) == name:
            yield eqn
        for inner in subjaxprs(eqn):
            yield from _naming(inner, name)
