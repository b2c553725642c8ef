"""Publishes the site as static files, beside the versions that are there: ``make publish-docs``.

The root gets a folder for each version, ``latest`` for the newest state and ``v0.1`` for the release 0.1.x,
``versions.json``, from which pages make the list of versions, and an ``index.html`` that leads to ``latest``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

from mpmd.version import __version__

DOCS = pathlib.Path(__file__).parent
LATEST = "latest"
INDEX = """<!doctype html>
<meta charset="utf-8">
<title>mpmd</title>
<meta http-equiv="refresh" content="0; url=latest/index.html">
<p><a href="latest/index.html">The documentation of mpmd</a></p>
"""


def build(
    source: pathlib.Path, folder: str, target: pathlib.Path
) -> None:
    """Builds the pages of a source for a folder of the root. Raises ``CalledProcessError`` at a warning."""
    environment = {**os.environ, "SITE_FOLDER": folder}
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-E",
        "-W",
        "--keep-going",
        "-c",
        str(DOCS),
    ]
    doctrees = target.with_suffix(".doctrees")
    try:
        subprocess.run(
            [*command, "-d", doctrees, source, target],
            env=environment,
            check=True,
        )
    finally:
        shutil.rmtree(doctrees, ignore_errors=True)


def publish(
    root: pathlib.Path,
    url: str,
    release: bool,
    build_pages: Callable[[str, pathlib.Path], None],
) -> None:
    """Renews the folder of the newest state, and with ``release`` that of this version.

    Args:
      root: the folder that a server shows at ``url``; other versions in it stay.
      url: an absolute path, or an address, that ends with a slash.
      build_pages: writes the pages for a folder of the root to a path.
    """
    if not url.endswith("/"):
        raise ValueError(
            f"the address of the site ends with a slash, unlike {url!r}"
        )
    root.mkdir(parents=True, exist_ok=True)
    for folder in (LATEST, *([release_folder()] if release else [])):
        fresh = root / f"{folder}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        build_pages(folder, fresh)
        shutil.rmtree(root / folder, ignore_errors=True)
        fresh.rename(root / folder)
    (root / "versions.json").write_text(
        json.dumps(versions(root, url), indent=2) + "\n"
    )
    (root / "index.html").write_text(INDEX)
    (
        root / ".nojekyll"
    ).touch()  # GitHub Pages would leave out folders like `_static`


def release_folder() -> str:
    """The folder of the release that this version belongs to."""
    return "v" + ".".join(__version__.split(".")[:2])


def versions(
    root: pathlib.Path, url: str
) -> list[dict[str, str | bool]]:
    """The entries of ``versions.json``, as the theme reads them: the newest state, then the releases."""
    releases = [
        path.name
        for path in root.iterdir()
        if re.fullmatch(r"v\d+\.\d+", path.name)
    ]
    releases.sort(
        key=lambda name: [
            int(number) for number in name[1:].split(".")
        ],
        reverse=True,
    )
    return [
        {
            "name": name,
            "version": name,
            "url": f"{url}{name}/",
            "preferred": name == LATEST,
        }
        for name in (LATEST, *releases)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Publishes the site as static files."
    )
    parser.add_argument(
        "root", type=pathlib.Path, help="the folder that a server shows"
    )
    parser.add_argument(
        "--url",
        default="/",
        help="its address or absolute path, with a slash at the end",
    )
    parser.add_argument(
        "--release",
        action="store_true",
        help="also as the release of this version, such as v0.1",
    )
    arguments = parser.parse_args()
    publish(
        arguments.root,
        arguments.url,
        arguments.release,
        functools.partial(build, DOCS),
    )


if __name__ == "__main__":
    main()
