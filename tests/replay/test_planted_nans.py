"""The line that makes a NaN, from the directory of the captured task alone, with JAX and numpy alone."""

import json
import subprocess
import sys

import pytest

from mpmd.errors import NonFiniteError
from tests.support.only_jax import ROOT, WITHOUT_OTHERS
from tests.support.planted_nans import PROGRAMS, line_of, run

REPLAYS = """
import json, sys
from pathlib import Path
from mpmd.replay import environment, files

directories = {path.parent.name: path for path in sorted(Path(sys.argv[1]).glob("*/*"))}
environment.prepare(max(map(files.read_task, directories.values()), key=lambda task: task.num_devices))
from mpmd.replay import load
from mpmd.replay.report import as_json, replay

print(json.dumps({name: as_json(replay(load(path))) for name, path in directories.items()}))
"""


@pytest.fixture(scope="module")
def replays(tmp_path_factory):
    """The replay of each program's task, in one process for all: that is most of the time."""
    directory = tmp_path_factory.mktemp("captured")
    for name, program in PROGRAMS.items():
        with pytest.raises(NonFiniteError) as raised:
            run(program(), directory / name)
        assert "mpmd replay" in raised.value.__notes__[0]
    program = [sys.executable, "-c", WITHOUT_OTHERS + REPLAYS, str(directory)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.usual("scan_over_layers", "attention_mask")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_line_is_named(replays, name):
    evaluation = replays[name]["evaluation"]
    first = evaluation["first"]
    assert first["source"]["line"].split(" ")[0].endswith(f"planted_nans.py:{line_of(name)}"), first
    assert first["kind"] == PROGRAMS[name]().kind
    assert evaluation["reaches_result"] and evaluation["skipped"] == []
    assert replays[name]["fault"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_executable_has_the_recorded_bits(replays, name):
    assert replays[name]["not_run"] == ""
    assert replays[name]["differences"] == []
