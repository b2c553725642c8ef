"""Chooses stages, shardings, schedule and microbatches for a step and a cluster.

A step and a ``Cluster`` enter; a ``Choice`` leaves. Start reading in ``choose.py``. The search reads three
records without JAX: the table of a step's layers (``layer_profile.py``), the devices and links of a cluster
(``hardware.py``), and the user's constraints (``constraints.py``). ``profiling`` makes the table,
``search`` ranks candidates by formulas, ``trials`` plans and simulates the best, and ``rerank.py`` ranks
these plans.
"""
