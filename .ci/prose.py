"""Looks at the prose of pages and docstrings, as a part of ``make lint``.

    python .ci/prose.py

Code is left out: in pages, blocks, spans and the addresses of links; in docstrings, spans between double
backticks and examples after ``::``. The rest keeps its lines, so that faults have theirs. Two readers look at
it: proselint with ``CHECKS``, and ``WORDS``, the house's own list. codespell looks at the spelling.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from proselint.checks import __register__ as ALL_CHECKS
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parents[1]

CHECKS = {"checks": {**DEFAULT["checks"], "typography": False}, "max_errors": 1000}
"""proselint's, without those for the typography of books, such as curly quotes."""

WORDS = {
    r"basically|actually|obviously|of course|simply|easily": "leave it out",
    r"seamless(?:ly)?|powerful|blazing(?:ly)?|leverages?|effortless(?:ly)?": "say what it does",
    r"in order to": "to",
    r"whilst|amongst|upon|hitherto": "while, among, on, until now",
    r"hence|thus|thereby|whereby|wherein|thereof|whosoever": "so, by which, in which, of it, whoever",
    r"nobody misses|none of a copy|what contradicts": "the subject first, one clause",
}
"""Words that no page and no docstring has, each with what to write in their place."""

RIDDLE = re.compile(
    r"(?:What|How|Where|When|Why|Which|Who|Those|That|Others|So many|So much"
    r"|The ones? (?:of|that|in|which|with)|(?:Makes|Gives|Does|Has) (?:what|those|the one))\b"
)
"""Words with which no docstring begins, since they stand for a thing that the docstring never names."""

_FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1[^\n]*$", re.MULTILINE | re.DOTALL)
_SPANS = re.compile(r"``.+?``|`[^`]+`|\]\([^)]*\)|https?://\S+|<[^<>\n]+>", re.DOTALL)


def main() -> None:
    """Prints all faults; exits with 1 if there are any."""
    CheckRegistry().register_many(ALL_CHECKS)
    listed = [fault for path in files() for fault in faults(path)]
    for fault in listed:
        print(fault)
    sys.exit(bool(listed))


def files() -> list[Path]:
    """The pages, and the files whose docstrings are read: those of the tests are not."""
    code = (
        path for room in ("mpmd", "cluster", "examples", "benchmarks") for path in (ROOT / room).rglob("*.py")
    )
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *code])


def faults(path: Path) -> Iterator[str]:
    """The faults of a file, each with its line."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    text = prose_of_code(source) if path.suffix == ".py" else prose_of_page(source)
    pairs = [*words_in(text), *read_by_proselint(text)]
    pairs += riddles(source) if path.suffix == ".py" else rows_without_head(text)
    return (f"{name}:{line}: {message}" for line, message in sorted(pairs))


def prose_of_page(text: str) -> str:
    """A page without code; its lines stay."""
    return _without_spans(_FENCE.sub(lambda block: "\n" * block[0].count("\n"), text))


def prose_of_code(source: str) -> str:
    """The docstrings of a file without code, on their lines; all other lines are empty."""
    lines = [""] * (source.count("\n") + 1)
    for node in docstrings(source):
        assert node.end_lineno is not None
        written = source.splitlines()[node.lineno - 1 : node.end_lineno]
        text = "\n".join(_without_examples(written)).replace('"""', "   ")
        lines[node.lineno - 1 : node.end_lineno] = _without_spans(text).split("\n")
    return "\n".join(lines)


def docstrings(source: str) -> Iterator[ast.Constant]:
    """The texts that stand by themselves: docstrings, also those of constants and attributes."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def words_in(text: str) -> Iterator[tuple[int, str]]:
    """The line of each word of ``WORDS``, and what to write in its place."""
    for pattern, instead in WORDS.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            yield text.count("\n", 0, match.start()) + 1, f"{match[0]!r}: {instead}"


def riddles(source: str) -> Iterator[tuple[int, str]]:
    """The lines of docstrings that begin with words of ``RIDDLE``."""
    for node in docstrings(source):
        if match := RIDDLE.match(str(node.value).lstrip()):
            yield node.lineno, f"the docstring begins with {match[0]!r}: name the thing again"


def rows_without_head(text: str) -> Iterator[tuple[int, str]]:
    """The first rows of tables without a head, as behind a blank line in a table: they show as text."""
    for match in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        if not re.match(r".*\n\|[ :|-]+\|\n", match[0]):
            yield (
                text.count("\n", 0, match.start()) + 1,
                "a row without the head of its table: no blank line before it",
            )


def read_by_proselint(text: str) -> Iterator[tuple[int, str]]:
    """The line and the message of each of proselint's faults."""
    for fault in LintFile("text", text).lint(CHECKS) if text.strip() else ():
        (line, _), message = fault.pos, fault.check_result.message
        # Numbers may stand side by side, and a paragraph may begin with the word of its heading.
        if not re.search(r"illusion in '(?:[\d\s]+|[^']*\n[^']*)'", message):
            yield line, message


def _without_examples(lines: Iterable[str]) -> Iterator[str]:
    """Lines without those that follow ``::`` and are indented further."""
    indent: int | None = None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if indent is not None and line.strip() and depth <= indent:
            indent = None
        yield "" if indent is not None else line
        if line.rstrip().endswith("::"):
            indent = depth


def _without_spans(text: str) -> str:
    """The text with a different word of the same length, and the same lines, for each span of code."""
    numbers = itertools.count()

    def word(span: re.Match[str]) -> str:
        lines = [f"q{next(numbers)}".ljust(len(line), "_")[: len(line)] for line in span[0].split("\n")]
        return "\n".join(lines)

    return _SPANS.sub(word, text)


if __name__ == "__main__":
    main()
