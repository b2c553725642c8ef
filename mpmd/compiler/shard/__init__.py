"""The fourth pass: a ``TaskGraph`` enters, a ``ShardedGraph`` leaves.

``infer_specs.py`` says how values outside the loop and accumulators are sharded within a group; ``reads.py``
tells weights from the batch; ``microbatch_dimensions.py`` keeps the rows of a batch sharded that the step
cuts; ``gather.py`` has weights gathered once per step, if asked to; ``partial_accumulators.py`` has sums over
a sharded batch stay in parts until the loop has ended, and ``partial_sums.py`` explains how: ``sums.py`` cuts
the equations that sum, and ``linear.py`` says what may be done to parts as to the whole. Before all that,
``forwarded_results.py`` gives results values of their own where they are asked for with other specs.
"""

from mpmd.compiler.shard.shard import shard

__all__ = ["shard"]
