"""``python -m mpmd``: the command line."""

import sys

from mpmd.cli import main

sys.exit(main())
