"""The command ``mpmd``: schedules, plans, pages of measured steps, captured tasks, and the installation.

The arguments of a command line enter; text, files and an exit code leave. Start reading in ``main.py``, the
parser. Each command is a file with ``add_commands``, which ``main.py`` calls. ``schedule.py``, ``report.py``
and ``doctor.py`` load no JAX.
"""

from mpmd.cli.main import main

__all__ = ["main"]
