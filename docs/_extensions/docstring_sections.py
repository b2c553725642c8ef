"""Makes reStructuredText of the docstrings.

``Returns:`` and ``Raises:`` begin with their text in the same line, and become fields; napoleon knows these
sections only with their text below. A letter behind a literal, as of a plural, needs an escape. Constructors
of objects that functions return have no parameters for users, so their classes are shown without.
"""

import inspect
import re

RETURNED = {
    "Choice",
    "ClusterMesh",
    "Explanation",
    "Gap",
    "LoadedStep",
    "LoweredStep",
    "MpmdArray",
    "MpmdFunction",
    "Profile",
    "Report",
    "Simulation",
}
"""Classes whose objects are results of functions."""


def setup(app):
    app.connect(
        "autodoc-process-docstring", make_fields, priority=400
    )  # before napoleon
    app.connect("autodoc-process-signature", without_parameters)
    return {"parallel_read_safe": True}


def make_fields(app, what, name, obj, options, lines):
    fields = []
    escaped = re.sub(
        r"(``[^`]+``)(\w?)",
        lambda m: rf"{m[1]}\ {m[2]}" if m[2] else m[1],
        "\n".join(lines),
    )
    for line in escaped.split("\n"):
        if section := re.match(r"(Returns|Raises): (.+)", line):
            fields += ["", f":{section[1].lower()}: {section[2]}"]
        else:
            fields.append(line)
    lines[:] = fields


def without_parameters(
    app, what, name, obj, options, signature, return_annotation
):
    if inspect.isclass(obj) and obj.__name__ in RETURNED:
        return "", None
    return None
