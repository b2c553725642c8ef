"""Runs the tests with the releases of Python, JAX and Ray that the project supports: ``make test-versions``.

Each combination is a session with an environment of its own in ``.nox``; the newest releases that the pins in
``pyproject.toml`` allow are installed there. All but the slow tests run with the oldest and the newest pair
of Python and JAX. On one Python, the tests of what a release of JAX changes run with those between them.
The tests of all uses of Ray run with its oldest release, a middle one and the newest. At the end nox prints a
line for each session: ``success``, ``failed``, or ``skipped`` where this machine does not have that Python.
Arguments after ``--`` go to pytest, in place of the tests named here::

    nox                                                              # the sessions that `nox -l` marks
    nox -s tests -- -m "not slow"                                    # all of them with every combination
    nox -s "tests(python='3.13', jax='0.12.0.1')" -- tests/compiler
    nox -s ray                                                       # the releases of Ray
"""

import nox
from nox.command import CommandFailed

JAX_RELEASES = {
    "3.11": ["0.10.2"],  # later releases do not install there
    "3.12": ["0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1"],
    "3.13": ["0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1"],
}
"""For each Python, the releases of JAX that the tests can run with, oldest first."""

PAIRS = [(python, jax) for python, releases in JAX_RELEASES.items() for jax in releases]

WHOLE = [PAIRS[0], PAIRS[-1]]
"""The oldest and the newest pair of Python and JAX, with which all but the slow tests run."""

BETWEEN = [("3.12", jax) for jax in JAX_RELEASES["3.12"] if jax not in {release for _, release in WHOLE}]
"""The releases of JAX between them, with which ``JAX_TESTS`` run."""

JAX_TESTS = [
    "tests/compiler",  # jaxprs, which releases write in other ways
    "tests/conformance",
    "tests/explanation",
    "tests/runtime",
    "tests/memory",
    "tests/arrays",
    "tests/step",
    "tests/checkpoint",  # arrays that Orbax reads and writes
    "tests/cluster/process",  # programs in JAX's export format, and the compilation cache
    "tests/planner/test_measure.py",  # of the planner what uses ``mpmd/compat.py``
    "tests/planner/test_profile.py",
    "tests/ray/test_conformance.py",
]
"""The tests that depend on the release of JAX: of packages that use ``mpmd/compat.py``, and programs."""

RAY_RELEASES = ["2.54.0", "2.57.1", "2.60.0"]
"""The oldest release of Ray, a middle one and the newest, as ``cluster/ray_compat.py`` names them."""

RAY_TESTS = [
    "tests/cluster/test_ray_compat.py",
    "tests/ray/test_launch.py",  # starting, joining, reservations, environments, dead clusters
    "tests/ray/test_transports.py",  # the object store, and actors that talk to one another
    "tests/ray/test_failures.py",  # the errors by which Ray says that an actor has died
    "tests/ray/test_recovery.py",  # actors that are replaced and moved, metrics
    "tests/ray/test_recovery_nodes.py",  # nodes that die, come and are drained
    "tests/ray/test_describe.py",
    "tests/ray/test_job.py",
]
"""The smallest set that touches each use of Ray. It runs whole: nodes that die are in slow tests."""

nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = [
    "ray",  # first: its tests wait for processes, so they show soonest what a machine is too slow for
    *(f"tests(python={python!r}, jax={jax!r})" for python, jax in [*WHOLE, *BETWEEN]),
]


@nox.session
@nox.parametrize("python,jax", PAIRS)
def tests(session: nox.Session, jax: str) -> None:
    """Installs the project with a release of JAX, and runs its tests."""
    try:
        session.install("--editable", ".[dev]", f"jax=={jax}", f"jaxlib=={jax}")
    except CommandFailed:
        session.error(
            f"JAX {jax} and what the project needs do not install together on Python {session.python}"
        )
    folders = [] if (session.python, jax) in WHOLE else JAX_TESTS
    session.run("python", "-m", "pytest", *(session.posargs or ["-m", "not slow", *folders]))


@nox.session(python="3.11")
@nox.parametrize("release", RAY_RELEASES)
def ray(session: nox.Session, release: str) -> None:
    """Installs the project with a release of Ray, and runs the tests that use Ray."""
    session.install("--editable", ".[dev]", f"ray[default]=={release}")
    # Older releases warn of a coming default, and leave the files and processes of a start to the collector.
    expected = ["FutureWarning", "ResourceWarning", "pytest.PytestUnraisableExceptionWarning"]
    allowed = [option for warning in expected for option in ("-W", f"ignore::{warning}")]
    session.run("python", "-m", "pytest", *allowed, *(session.posargs or RAY_TESTS))
