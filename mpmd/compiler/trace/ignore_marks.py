"""Takes the marks out of a function without a loop, which has no stages."""

from __future__ import annotations

from jax.extend.core import Jaxpr

from mpmd.compiler.jaxprs.equations import any_inside
from mpmd.compiler.jaxprs.live import live_eqns
from mpmd.compiler.jaxprs.marks import without_marks
from mpmd.compiler.trace.check_loop import first_mark
from mpmd.errors import PerformanceWarning
from mpmd.language.annotate import mark_of, mark_p
from mpmd.util.warn import warn_user


def ignore_marks(jaxpr: Jaxpr) -> Jaxpr:
    """The function without its marks: outside of a loop they are the identity.

    Warns: ``PerformanceWarning`` when a result depends on one. The marks of a model that is called to find
      the shapes of its weights are dead code.
    """
    live = live_eqns(jaxpr.eqns, jaxpr.outvars)
    marks = (first_mark(e) for e in live if mark_of(e) or any_inside(e, mark_p))
    mark = next(marks, None)
    if mark is not None:
        warn_user(
            f"{mark} is outside of any treduce, so no stage ends there: the "
            "function runs where its arguments are, and is no pipeline. Wrap the loop over microbatches in "
            "mpmd.treduce",
            PerformanceWarning,
        )
    return without_marks(jaxpr)
