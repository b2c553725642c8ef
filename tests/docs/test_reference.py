"""The reference has every public name once, and every command."""

import argparse
import functools
import importlib.util
import inspect
import re

import cluster
import mpmd
from mpmd.cli.main import _parser
from tests.support.pages import DOCS

PAGES = {path.stem: path.read_text() for path in (DOCS / "reference").glob("*.md")}
DIRECTIVES = [
    (page, name)
    for page, text in PAGES.items()
    for name in re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)", text, re.MULTILINE)
]
MODULES = (mpmd, mpmd.simulate, mpmd.render, mpmd.replay, mpmd.checkpoint, cluster)
PACKAGES = {"mpmd.checkpoint", "mpmd.render", "mpmd.replay", "mpmd.simulate"}
PUBLIC = sorted(
    {f"{module.__name__}.{name}" for module in MODULES for name in module.__all__ if not name.startswith("_")}
    - PACKAGES
)


def object_of(name):
    module, _, rest = name.partition(".")
    path = rest.split(".")
    while len(path) > 1 and importlib.util.find_spec(f"{module}.{path[0]}"):
        module, path = f"{module}.{path[0]}", path[1:]
    return functools.reduce(getattr, path, importlib.import_module(module))


def test_every_public_name_is_there_once():
    objects = [(page, other, object_of(other)) for page, other in DIRECTIVES]  # raises for one that is none
    described = {
        name: [(page, other) for page, other, value in objects if value is object_of(name)] for name in PUBLIC
    }
    assert not {name: places for name, places in described.items() if len(places) != 1}
    assert not [
        name
        for name, [(page, other)] in described.items()
        if other != name and f"`{name}`" not in PAGES[page]
    ]


def test_every_package_of_public_names_is_there():
    pages = "".join(PAGES.values())
    assert not [name for name in PACKAGES if f"`{name}`" not in pages]


def test_the_signature_of_jit_is_that_of_the_function():
    """Overloads have signatures of their own, which the page replaces."""
    written = re.search(r"autofunction:: mpmd\.jit\((.*)\)", PAGES["writing_a_step"])[1]
    parameters = inspect.signature(mpmd.jit).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    shown = [f"{parameter.name}={parameter.default!r}" for parameter in named]
    assert [part for part in written.split(", ") if part != "*"] == shown


def test_every_command_is_there():
    def commands(parser, words=()):
        nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if words:
            yield " ".join(words)
        for action in nested:
            for word, child in action.choices.items():
                yield from commands(child, (*words, word))

    shown = re.findall(r"```\{command-help\}\n(.*?)\n```", PAGES["the_command_line"], re.DOTALL)
    assert "\n".join(shown).splitlines() == [*commands(_parser())]
    assert [f"## mpmd {block.split()[0]}" for block in shown] == re.findall(
        "## .*", PAGES["the_command_line"]
    )
