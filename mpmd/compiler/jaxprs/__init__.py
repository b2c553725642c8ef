"""Knowledge of jaxprs that passes share.

- As they are: ``canonical.py`` and ``transposed_products.py`` say which form all passes keep,
  ``equations.py`` reads and makes equations, ``traced.py`` has JAX write them, ``scans.py``,
  ``control_flow.py`` and ``remat.py`` know those with bodies, and ``marks.py`` finds marks.
- Their dimensions: ``rules.py`` says which are one and the same, and where to start with a new primitive,
  ``sharded_dimensions.py`` how they are sharded.
- What they cost: ``cost.py`` says which are cheap, ``work.py`` how much they compute, read and write.
- For people: ``source.py`` finds the user's lines that equations come from, and ``printing.py`` prints
  equations with names that are the same in every run.
"""
