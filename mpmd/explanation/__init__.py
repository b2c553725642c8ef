"""Explains a compiled step: the groups of values, the messages, and the lines of the user's that tasks run.

A plan enters, with the equations of its tasks; an ``Explanation`` leaves, which prints as text. Start reading
in ``explanation.py``; its parts are in ``leaves.py``, ``traffic.py``, ``tasks.py`` and ``uses.py``.
``explain.py`` makes them from the plan, and ``provenance.py`` finds the lines that equations come from.
``report.py`` lists the needs of each group, and the seconds of compiling. ``work.py`` counts operations, and
``findings.py`` and ``mistakes.py`` name facts that the user probably did not intend.
"""

from mpmd.explanation.explain import explain_plan
from mpmd.explanation.explanation import Explanation
from mpmd.explanation.mistakes import warn_of_mistakes, warn_of_undonated_state
from mpmd.explanation.report import Report, report
from mpmd.explanation.tasks import sources_of
from mpmd.explanation.work import operation_costs

__all__ = [
    "Explanation",
    "Report",
    "explain_plan",
    "operation_costs",
    "report",
    "sources_of",
    "warn_of_mistakes",
    "warn_of_undonated_state",
]
