"""Levels of a step, as the compiler's passes make them."""

from mpmd.compiler.cut_layers import cut_layers
from mpmd.compiler.request import CompileRequest
from mpmd.compiler.split import split
from mpmd.compiler.trace import trace
from tests.support.parity import mesh_of


def task_graph(step, *args, groups):
    """The work of a step's stages on groups of one device."""
    with mesh_of(groups) as mesh:
        return split(cut_layers(trace(CompileRequest(step, args, {}, mesh.abstract_submeshes))))
