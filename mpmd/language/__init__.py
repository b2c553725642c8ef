"""The language that a train step is written in.

``annotate.py`` marks where stages end and ``reduce.py`` is ``treduce``, the loop over microbatches: start
reading there. ``gradients.py`` has ``value_and_grad`` and ``grad``, which cut a batch and are such a loop.
``operations.py`` has the operations that combine the results of microbatches, ``carry.py`` hands values from
one microbatch to the next, and ``pieces.py`` cuts batches and layers evenly. ``per_group.py`` has functions
that are traced for each group, ``callbacks.py`` functions that run in the driver, and ``identities.py`` the
primitives by which marks and kernels reach the compiler. By ``decisions.py``, the planner provides what a
step leaves open, such as its schedule. Nothing here knows the compiler.
"""
