"""Functions on jaxprs that several passes need.

- Form: ``canonical.py`` and ``transposed_products.py`` write the form that all passes keep, ``equations.py``
  reads and makes equations, ``inline.py`` opens calls, ``traced.py`` has JAX write equations, ``scans.py``
  reads scans and writes their parts, ``control_flow.py`` and ``remat.py`` rewrite equations with bodies,
  and ``marks.py`` finds marks and loops.
- Dimensions: ``rules.py`` lists the dimensions that the operands and results of each primitive have in common
  (start there for a new primitive); ``sharded_dimensions.py`` follows their shardings.
- Costs: ``cost.py`` finds cheap equations; ``work.py`` counts operations, and bytes read and written.
- For people: ``source.py`` finds the user's lines that equations come from, and ``printing.py`` prints
  equations with names that are the same in every run.
"""
