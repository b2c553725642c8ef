"""Plans candidates as they would run, and predicts them from their plans.

A ``Candidate`` and a step enter; a ``Prediction`` leaves. Start reading in ``trials.py``; ``realize.py``
plans one candidate, ``shardings.py`` gives arguments their specs, and moments of the optimizer the spec of
their weight, ``device_work.py`` estimates the work of tasks, and ``measure.py`` runs the tasks.
"""
