"""The fourth pass: a ``TaskGraph`` enters, a ``ShardedGraph`` leaves.

``infer_specs.py`` says how values outside the loop and accumulators are sharded within a group; ``reads.py``
tells weights from the batch; ``microbatch_dimensions.py`` keeps the rows of a batch sharded that the step
cuts; ``gather.py`` has weights gathered once per step, if asked to; ``partial_sums.py`` has sums over a
sharded batch stay in parts until the loop has ended, and explains how. ``dimensions.py`` follows shardings
through the step for that, ``sums.py`` cuts the equations that sum, and ``linear.py`` says what may be done to
parts as to the whole. Before all that, ``argument_specs.py`` finds the specs of arguments, and
``forwarded_results.py`` gives results of their own where they are asked for with others.
"""

from mpmd.compiler.shard.argument_specs import argument_specs, fitting_parts
from mpmd.compiler.shard.forwarded_results import with_results_apart
from mpmd.compiler.shard.shard import shard

__all__ = ["argument_specs", "fitting_parts", "shard", "with_results_apart"]
