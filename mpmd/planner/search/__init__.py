"""Searches for the best ways to run a step on a cluster, by formulas and without JAX.

A ``Profile``, a ``Cluster`` and what is fixed enter; rows of the table leave. Start reading in ``search.py``;
``formula.py`` says what a candidate costs.
"""
