"""Prints the notes of a release: its section of CHANGELOG.md.

    python .ci/release_notes.py 0.1.0

It fails where the section is not there, or says that the version is not released yet; and where another
version is in ``mpmd/version.py`` or ``CITATION.cff``.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(version: str, changelog: str) -> str:
    """The section of a version. Raises ``ValueError`` where it is not that of a release."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    headings = {section.partition(",")[0].strip(): section for section in sections}
    if version not in headings:
        raise ValueError(f"CHANGELOG.md has no section {version!r}, but {', '.join(headings) or 'none'}")
    heading, _, body = headings[version].partition("\n")
    if not re.search(r"\d{4}-\d{2}-\d{2}$", heading):
        raise ValueError(
            f"the section {heading!r} of CHANGELOG.md has no date: write '## {version}, 2026-01-31'"
        )
    return body.strip() + "\n"


def check_version(version: str, root: Path = ROOT) -> None:
    """Raises ``ValueError`` where a file has another version."""
    for name, pattern in (
        ("mpmd/version.py", r'^__version__ = "(.*)"$'),
        ("CITATION.cff", r"^version: (.*)$"),
    ):
        (written,) = re.findall(pattern, (root / name).read_text(), re.MULTILINE)
        if written != version:
            raise ValueError(f"{name} has the version {written}, and the release is {version}")


if __name__ == "__main__":
    (released,) = sys.argv[1:]
    try:
        check_version(released)
        print(notes(released, (ROOT / "CHANGELOG.md").read_text()), end="")
    except ValueError as error:
        sys.exit(str(error))
