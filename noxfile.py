"""Runs the tests with every combination of Python and JAX that the project supports: ``make test-versions``.

Each combination is a session with an environment of its own in ``.nox``; the newest releases that the pins in
``pyproject.toml`` allow are installed there. At the end nox prints a line for each session: ``success``,
``failed``, or ``skipped`` where this machine does not have that Python. Arguments after ``--`` go to pytest::

    nox                                                              # every combination; all but slow tests
    nox -s "tests(python='3.13', jax='0.12.0.1')" -- tests/compiler
"""

import nox
from nox.command import CommandFailed

JAX_RELEASES = {
    "3.11": ["0.10.2"],  # later releases do not install there
    "3.12": ["0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1"],
    "3.13": ["0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1"],
}
"""For each Python, the releases of JAX that the tests run with, oldest first."""

nox.options.reuse_existing_virtualenvs = True


@nox.session
@nox.parametrize(
    "python,jax", [(python, jax) for python, releases in JAX_RELEASES.items() for jax in releases]
)
def tests(session: nox.Session, jax: str) -> None:
    """Installs the project with a release of JAX, and runs its tests."""
    try:
        session.install("--editable", ".[dev]", f"jax=={jax}", f"jaxlib=={jax}")
    except CommandFailed:
        session.error(
            f"JAX {jax} and what the project needs do not install together on Python {session.python}"
        )
    session.run("python", "-m", "pytest", *(session.posargs or ["-m", "not slow"]))
