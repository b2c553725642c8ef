"""The first pass: a user's function and the shapes of its arguments enter, a ``TracedStep`` leaves.

``trace.py`` says for which types of arguments the function is traced. ``to_jaxpr.py`` composes the rest:
JAX traces the function (``traced_within.py``), equations get their canonical form (``jaxprs/canonical.py``),
meshes of devices become abstract, and shardings leave the types of values (``over_submeshes.py``), what
cannot be compiled is refused (``check_loop.py``), marks outside of loops are left out (``ignore_marks.py``),
and the results that the next step takes as arguments are found (``fed_back.py``).
"""

from mpmd.compiler.trace.ignore_marks import warn_of_ignored_marks
from mpmd.compiler.trace.trace import trace

__all__ = ["trace", "warn_of_ignored_marks"]
