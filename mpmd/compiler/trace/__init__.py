"""The first pass: a user's function and the shapes of its arguments enter, a ``TracedStep`` leaves.

``trace.py`` composes the pass: JAX traces the function, its equations get their canonical form
(``jaxprs/canonical.py``), meshes of devices become abstract (``abstract_meshes.py``), what cannot be compiled
is refused (``check_loop.py``), the marks get the numbers of their stages (``number_marks.py``), equations
that nothing needs are removed (``dead_code.py``), and the arguments that a next step takes from the results
are found (``carried_state.py``).
"""

from mpmd.compiler.trace.trace import trace

__all__ = ["trace"]
