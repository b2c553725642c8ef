"""The specs of steps that no user has called."""

from mpmd.compiler.argument_specs import ArgumentSpecs
from mpmd.compiler.steps import CutStep
from mpmd.ir.placement import ANYWHERE


def without_shardings(step: CutStep) -> ArgumentSpecs:
    """The specs of a step without ``in_shardings``: every leaf is replicated."""
    arguments, results = len(step.arguments), len(step.results)
    anywhere = (ANYWHERE,) * arguments, (ANYWHERE,) * results
    return ArgumentSpecs(None, ((),) * arguments, (None,) * results, False, *anywhere)
