"""Runs plans: a ``Program`` is loaded by the groups, and then steps are submitted to them.

``protocol.py`` is where to start reading: what the driver asks of the groups. ``in_process.py`` implements
it with threads. What a group does is in ``worker.py``, which keeps its programs and values; ``executor.py``,
which runs one step; and ``transport.py``, by which groups exchange messages.
"""
