"""A process of a group: an actor, whose methods the driver calls.

To read in order: ``actor`` (the methods), ``compilation_cache`` (of JAX), ``world`` and ``agreement`` (the
processes of a group: how they meet, and how they leave a step together), ``slices`` and ``array_slices``
(messages between groups of several processes).
"""
