"""Chooses stages, shardings, schedule and microbatches for a step and a cluster.

A step and a ``Cluster`` enter; a ``Choice`` leaves. Start reading in ``choose.py``. ``profile.py`` has what
the search knows of a step: a table of its layers, without JAX. ``hardware.py`` has what it knows of a
cluster, ``candidate.py`` what it may choose. ``layers`` finds layers, ``profiling`` makes the table,
``search`` ranks candidates by formulas, and ``trials`` plans and simulates the best.
"""
