"""The command ``mpmd``, which needs neither JAX nor an accelerator: shows, compares and checks schedules.

The arguments of a command line enter; text, files and an exit code leave. Start reading in ``main.py``, the
parser. ``schedule.py`` has the commands for schedules; a new command is a file like it, added in ``main.py``.
"""

from mpmd.cli.main import main

__all__ = ["main"]
