"""The command ``mpmd``: shows and checks schedules, plans steps, shows runs, and checks the installation.

The arguments of a command line enter; text, files and an exit code leave. Start reading in ``main.py``, the
parser. ``schedule.py`` has the commands for schedules, which load no JAX, ``plan.py`` plans steps, and
``doctor.py`` checks the installation, and ``top.py`` shows runs; a new command is a file like them, added in
``main.py``.
"""

from mpmd.cli.main import main

__all__ = ["main"]
