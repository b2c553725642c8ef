"""Prints the processor time of each test file, and of the dearest tests, as a plugin of pytest.

    python -m pytest -p tests.support.processor_time -n 2 -m "not slow" tests/conformance

Clocks of a busy machine say little, so this counts seconds of its processors: of all threads of the process
that runs a test, and of ended processes that it started. Apart are the seconds of set-up and teardown, and
those that XLA compiled by the clock.
"""

import collections
import os

import pytest

SHOWN = 30
_COMPILING = "/jax/core/compile/backend_compile_duration"
_compiled = collections.Counter()


def pytest_configure():
    import jax  # once tests/conftest.py has set the variables that JAX reads when it is imported

    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: _compiled.update({event: seconds})
    )


def _seconds():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the seconds since the last report of this process to the report, which workers send on."""
    report = yield
    before, compiled_before = getattr(item.session, "_seconds", (_seconds(), _compiled[_COMPILING]))
    item.session._seconds = _seconds(), _compiled[_COMPILING]
    spent, compiled = item.session._seconds[0] - before, item.session._seconds[1] - compiled_before
    report.user_properties.append(("processor", (call.when, spent, compiled)))
    return report


def pytest_sessionstart(session):
    session._seconds = _seconds(), _compiled[_COMPILING]


def pytest_collection_finish(session):
    session._seconds = _seconds(), _compiled[_COMPILING]


def pytest_terminal_summary(terminalreporter):
    files = collections.defaultdict(collections.Counter)
    tests = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for when, spent, compiled in _properties(report):
                file = files[report.nodeid.partition("::")[0]]
                file.update(all=spent, around=0 if when == "call" else spent, compiled=compiled)
                tests[report.nodeid] += spent
    terminalreporter.section("processor seconds")
    terminalreporter.write_line("  all   around tests   compiling   file")
    for name, file in sorted(files.items(), key=lambda item: -item[1]["all"])[:SHOWN]:
        terminalreporter.write_line(
            f"{file['all']:6.1f} {file['around']:10.1f} {file['compiled']:12.1f}    {name}"
        )
    terminalreporter.write_line(f"{sum(tests.values()):6.1f} in all, collection not counted")
    for name, spent in tests.most_common(SHOWN):
        terminalreporter.write_line(f"{spent:6.1f} {name}")


def _properties(report):
    """A report's own numbers: ``user_properties`` of a later phase repeat those of the earlier ones."""
    found = [value for name, value in getattr(report, "user_properties", ()) if name == "processor"]
    return [value for value in found[-1:] if value[0] == report.when]
