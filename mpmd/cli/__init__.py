"""The command ``mpmd``: schedules, plans, pages of measured steps, runs on Ray, and the installation.

The arguments of a command line enter; text, files and an exit code leave. Start reading in ``main.py``, the
parser. ``schedule.py`` has the commands for schedules, which load no JAX, ``plan.py`` plans steps,
``report.py`` makes pages, ``top.py`` shows runs, and ``doctor.py`` checks the installation; a new command is
a file like them, added in ``main.py``.
"""

from mpmd.cli.main import main

__all__ = ["main"]
