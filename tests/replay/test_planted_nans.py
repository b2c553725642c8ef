"""The line that makes a NaN, from the directory of the captured task alone, with JAX and numpy alone."""

import json
import subprocess
import sys

import pytest

from mpmd.errors import NonFiniteError
from tests.support.only_jax import ROOT, without_others
from tests.support.planted_nans import PROGRAMS, line_of, run

REPLAYS = """
import contextlib, io, json, sys
from pathlib import Path
from mpmd.cli.main import main
from mpmd.replay import environment, record

directories = {path.parent.name: path for path in sorted(Path(sys.argv[1]).glob("*/*"))}
environment.prepare(max(map(record.read_task, directories.values()), key=lambda task: task.num_devices))
import jax  # so that the command leaves the number of devices as it is

printed = {}
for name, path in directories.items():
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        code = main(["replay", str(path), "--json"])
    printed[name] = {"code": code, **json.loads(stdout.getvalue())}
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def replays(request, tmp_path_factory):
    """The replay of each chosen program's task, in one process for all: that is most of the time."""
    directory = tmp_path_factory.mktemp("captured")
    tests = [item for item in request.session.items if item.parent is request.node]
    for name in (item.callspec.params["name"] for item in tests):
        with pytest.raises(NonFiniteError) as raised:
            run(PROGRAMS[name](), directory / name)
        assert "mpmd replay" in raised.value.__notes__[0]
    program = [sys.executable, "-c", without_others() + REPLAYS, str(directory)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_line_is_named_and_the_executable_has_the_recorded_bits(replays, name):
    evaluation = replays[name]["evaluation"]
    first = evaluation["first"]
    assert first["source"]["line"].split(" ")[0].endswith(f"planted_nans.py:{line_of(name)}"), first
    assert first["kind"] == "NaN"
    assert evaluation["reaches_result"] and evaluation["skipped"] == []
    assert replays[name]["fault"] and replays[name]["code"] == 1
    assert (replays[name]["not_run"], replays[name]["differences"]) == ("", [])
