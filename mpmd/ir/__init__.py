"""The plan as plain data, without JAX.

Start reading in ``plan.py``, the plan and its operations. ``tasks.py`` has the grammar of tasks,
``names.py`` the grammar of values and executables; ``specs.py``, ``placement.py`` and ``stack.py`` say how
and where a value is laid out; ``messages.py`` says when groups take messages in, ``routes.py`` and
``reshard.py`` which slices processes exchange; ``events.py`` and ``process_times.py`` hold the times of a
step that ran.
"""
