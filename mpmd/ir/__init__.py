"""The plan as plain data, without JAX.

Start reading in ``plan.py``, the plan and its operations. ``tasks.py`` has the grammar of tasks and
``names.py`` that of values and executables; ``specs.py``, ``placement.py`` and ``stack.py`` say how and where
a value is laid out; ``routes.py`` and ``reshard.py`` which processes exchange which slices; ``events.py``
records a step that ran.
"""
