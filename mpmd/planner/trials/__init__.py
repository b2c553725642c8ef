"""Plans candidates as they would run, and predicts them from their plans.

A ``Candidate`` and a step enter; a ``Prediction`` leaves. Start reading in ``trials.py``; ``realize.py``
plans one candidate, ``device_work.py`` estimates the work of its tasks, and ``measure.py`` runs them.
"""
