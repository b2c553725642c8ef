"""``python -m mpmd``: the command line."""

import sys

from mpmd.cli.main import main

sys.exit(main())
