"""The command ``mpmd``, which needs no accelerator: shows, compares and checks schedules, and plans steps.

The arguments of a command line enter; text, files and an exit code leave. Start reading in ``main.py``, the
parser. ``schedule.py`` has the commands for schedules, which load no JAX, and ``plan.py`` plans steps; a new
command is a file like them, added in ``main.py``.
"""

from mpmd.cli.main import main

__all__ = ["main"]
