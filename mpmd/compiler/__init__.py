"""The compiler: a user's step enters, a program with a verified plan leaves.

========== ============= ============= ================================================================
pass       from          to            decisions
========== ============= ============= ================================================================
trace      a function    TracedStep    which arrays are state: results that the next step takes as
                                       arguments
cut_layers TracedStep    CutStep       where each stage ends, and so which layers of a scan and of stacked
                                       arrays it has
split      CutStep       TaskGraph     which stage's forward or backward computes each equation of the
                                       loop, which values a forward keeps for its backward, and which
                                       work accumulates each result
shard      TaskGraph     ShardedGraph  how values are sharded within a group, which values its devices
                                       gather or sum up once, before or after the loop
place      ShardedGraph  PlacedGraph   the group of each stage, and on which groups everything outside of
                                       loops is held and runs, such as an optimizer's update
lower      PlacedGraph   Plan          the order of tasks and messages, names, executables, frees,
                                       donations
verify     Plan          Verified      nothing: it proves that the plan can run (``mpmd.verify``)
========== ============= ============= ================================================================

Each pass is a package with one function of its name; ``pipeline.py`` runs them in this order. Passes do not
import one another: ``steps.py`` and ``graph.py`` have the levels that passes hand over, and ``jaxprs`` the
functions on jaxprs that several passes need. ``str()`` prints each level, and ``checks.py`` checks it after
the pass that returned it.

``request.py`` has the compiler's input, and ``argument_specs.py`` the input's shardings and placements.
``cut_scans`` is no pass: while a step is traced, it cuts scans where stages end. ``find_layers`` is no pass
either: ``mpmd.auto_marks`` calls it while the step is traced, and so does the planner.
"""
