"""The language that a train step is written in.

``annotate.py`` marks where stages end and ``reduce.py`` is ``treduce``, the loop over microbatches: start
reading there. ``gradients.py`` says both in one word, ``pieces.py`` cuts batches and layers evenly,
``carry.py`` hands values from one microbatch to the next, ``per_group.py`` and ``callbacks.py`` are functions
that need to know their group or run in the driver. ``decisions.py`` is the way in for a plan that decides
what the step leaves open. Nothing here knows the compiler.
"""
