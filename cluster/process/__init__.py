"""A process of a group: an actor, whose methods the driver calls.

To read in order: ``actor`` (the methods), ``environment`` (the variables that the process starts with),
``devices`` (JAX's devices and its compilation cache), ``world`` and ``agreement`` (the processes of a group:
how they meet, and how they leave a step together), ``slices`` and ``parts`` (messages between groups of
several processes).
"""
