"""Levels of a step, as the compiler's passes make them."""

import mpmd
from mpmd.compiler.argument_specs import ArgumentSpecs
from mpmd.compiler.cut_layers import cut_layers
from mpmd.compiler.request import CompileRequest
from mpmd.compiler.split import split
from mpmd.compiler.steps import CutStep
from mpmd.compiler.trace import trace
from mpmd.ir.placement import ANYWHERE


def submeshes(groups, **axes):
    """The meshes of groups, without devices."""
    return mpmd.AbstractMpmdMesh({"stage": groups, **axes}, "stage").abstract_submeshes


SUBMESHES = submeshes(2)


def traced_step(step, *args, submeshes=SUBMESHES):
    return trace(CompileRequest(step, args, {}, submeshes))


def task_graph(step, *args, groups):
    """The work of a step's stages on groups of one device."""
    return split(cut_layers(traced_step(step, *args, submeshes=submeshes(groups))))


def without_shardings(step: CutStep) -> ArgumentSpecs:
    """The specs of a step without ``in_shardings``: every leaf is replicated."""
    arguments, results = len(step.arguments), len(step.results)
    anywhere = (ANYWHERE,) * arguments, (ANYWHERE,) * results
    return ArgumentSpecs(None, ((),) * arguments, (None,) * results, False, *anywhere)
