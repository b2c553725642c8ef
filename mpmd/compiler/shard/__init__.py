"""The fourth pass: a ``TaskGraph`` enters, a ``ShardedGraph`` leaves.

First, ``infer_specs.py`` copies results that are also other results or arguments, with another spec, and says
how accumulators and values outside the loop are sharded within a group. ``reads.py`` tells weights from the
batch. ``microbatch_dimensions.py`` keeps the rows of a batch sharded
that the step cuts into microbatches, and ``gather.py`` has weights gathered once per step, if asked to.

Last, ``partial_accumulators.py`` has accumulators hold partial sums until the loop has ended.
``partial_sums.py`` explains how: ``sums.py`` has the rules for equations that sum, ``linear.py`` has the
equations that may be applied to partial sums in place of their sum, and ``make_partial_sums.py`` converts
between the two.
"""

from mpmd.compiler.shard.shard import shard

__all__ = ["shard"]
