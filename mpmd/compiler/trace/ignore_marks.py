"""Takes the marks out of a step's equations outside of loops, where they are the identity."""

from __future__ import annotations

from jax.extend.core import Jaxpr

from mpmd.compiler.cut_scans import layers_p
from mpmd.compiler.jaxprs.control_flow import live_eqns
from mpmd.compiler.jaxprs.equations import make_jaxpr
from mpmd.compiler.jaxprs.marks import marks_in, without_identities
from mpmd.compiler.jaxprs.source import line_of
from mpmd.compiler.steps import TracedStep
from mpmd.errors import PerformanceWarning
from mpmd.language.annotate import mark_p, mark_text
from mpmd.language.pieces import open_rows_p
from mpmd.language.reduce import treduce_p
from mpmd.util.tables import first_few
from mpmd.util.warn import warn_user


def ignore_marks(jaxpr: Jaxpr) -> tuple[Jaxpr, tuple[str, ...]]:
    """The step without its marks outside of loops.

    Returns: the names of the marks that a result depends on, too. The marks of a model that is called to find
      the shapes of its weights are dead code.
    """
    unmarked = without_identities(jaxpr, mark_p, layers_p, open_rows_p)
    if unmarked is jaxpr:
        return jaxpr, ()
    live = (eqn for eqn in live_eqns(jaxpr.eqns, jaxpr.outvars) if eqn.primitive is not treduce_p)
    marks = marks_in(make_jaxpr([], [*live], []))
    return unmarked, tuple(dict.fromkeys(mark_text(eqn, line_of(eqn)) for eqn, _ in marks))


def warn_of_ignored_marks(step: TracedStep) -> None:
    if not step.ignored_marks:
        return
    remedy = (
        "this computation is no pipeline, as is right for a loss that an optimizer evaluates. Otherwise "
        "compute it in a treduce of its own, with mpmd.ForwardOnly if it has no gradient"
        if step.has_loop
        else "the function runs where its arguments are, and is no pipeline. Wrap the loop over microbatches "
        "in mpmd.treduce"
    )
    marks = first_few(step.ignored_marks)
    warn_user(f"{marks}, outside of any treduce: no stage ends there, and {remedy}", PerformanceWarning)
