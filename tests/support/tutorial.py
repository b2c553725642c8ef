"""The blocks of the tutorial, as the site runs them."""

import pathlib
import re

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
CELLS = re.findall(r"```\{code-cell\} python\n(?::[^\n]*\n\n)?(.*?)```", TEXT, re.DOTALL)
(ON_RAY,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(DISPLAY,) = [cell for cell in CELLS if "IPython" in cell]
"""Shows a picture, which takes a notebook."""


def run(cells, monkeypatch):
    """The names after these blocks.

    The first block makes devices, before JAX is imported; here it was, and there are more devices.
    """
    for name, value in (("JAX_PLATFORMS", "cpu"), ("JAX_NUM_CPU_DEVICES", "2")):
        monkeypatch.setenv(name, value)
    names = {}
    for cell in cells:
        if cell != DISPLAY:
            exec(cell, names)
    return names
