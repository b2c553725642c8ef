"""Searches for the best ways to run a step on a cluster, by formulas and without JAX.

A ``LayerProfile``, the ``Hardware`` of a cluster and ``Constraints`` enter; rows of the table leave. Start
reading in ``search.py``; ``formula.py`` evaluates a candidate.
"""
