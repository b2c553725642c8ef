"""Knowledge of jaxprs that passes share.

``equations.py`` reads and makes equations, ``source.py`` finds the user's lines that they come from,
``cost.py`` says which are cheap, ``conditionals.py`` divides a ``lax.cond``, and ``printing.py`` prints
equations with names that are the same in every run.
"""
