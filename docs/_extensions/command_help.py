"""The directive ``command-help``: the help of commands of ``mpmd``, as ``mpmd COMMAND --help`` prints it."""

import os
import subprocess
import sys

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

COLUMNS = "72"


class CommandHelp(SphinxDirective):
    """Takes a line with the words of each command as its content."""

    has_content = True

    def run(self):
        return [self.help_of(words) for words in self.content]

    def help_of(self, words):
        command = [
            sys.executable,
            "-m",
            "mpmd",
            *words.split(),
            "--help",
        ]
        environment = {
            **os.environ,
            "COLUMNS": COLUMNS,
            "NO_COLOR": "1",
        }
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise self.error(f"{' '.join(command)}: {done.stderr}")
        return nodes.literal_block(
            done.stdout, done.stdout, language="none"
        )


def setup(app):
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
