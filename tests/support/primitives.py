"""The primitives that steps contain, and those of them of whose dimensions no rule says anything."""

import itertools

from mpmd.compiler.jaxprs.equations import all_eqns

_WITHIN_SHARD_MAP = "is in the function of a shard_map, which says itself how its values are divided"

WITHOUT_RULE = {
    **dict.fromkeys(
        "all_gather all_to_all axis_index psum psum_invariant pvary reduce_scatter".split(), _WITHIN_SHARD_MAP
    ),
    "shard_map": "says itself how its operands and results are divided",
    "cond": "its branches are read, one after the other, by what asks",
    "while": "its body is read by what asks",
    "remat2": "is opened, or its body read, by what asks",
    "checkpoint": "is opened, or its body read, by what asks",
    "call_jaxpr": "stands for a function that each group runs on its own mesh",
    "per_group": "its function is the group's own",
    "stage_end": "is read as a mark and removed",
    "treduce": "its body is read by what asks",
    "jit": "is in the function of a shard_map or of a reduction, which no pass opens",
    "host_callback": "has no results",
    "platform_index": "has no operands, and a result without dimensions",
    "empty2": "has no operands; what is written to it says what it is",
    "random_seed": "makes one key of one number",
    "random_gamma": "draws again until it accepts, for all elements at once",
    "select_and_scatter_add": "its windows overlap",
    "tile": "repeats a dimension, of which the parts would have to be in turns",
    "unstack": "takes its operand apart: see cut_layers/concat_and_slice.py",
}
"""Why each has none."""


def primitives_of(jaxpr):
    """The names of the primitives of a jaxpr and of the bodies in it."""
    return {eqn.primitive.name for eqn in all_eqns(jaxpr.eqns)}


def primitives_in(loaded):
    """Those of all that the groups run."""
    return set(itertools.chain.from_iterable(map(primitives_of, loaded.compiled.program.jaxprs.values())))
