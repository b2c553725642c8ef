"""``mpmd doctor``: what it finds, and what it says about faults."""

from __future__ import annotations

import importlib.metadata

import pytest

from mpmd.cli import doctor
from mpmd.cli.doctor import State
from mpmd.cli.main import main
from mpmd.version import __version__


def test_what_is_installed_here_is_well_and_a_step_runs(capsys):
    assert main(["doctor", "--no-ray"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all is well"
    by_subject = {line[9:29].strip(): line for line in lines[:-2]}
    assert __version__ in by_subject["mpmd"]
    assert by_subject["jax"].startswith("ok")
    assert "computes what jax.jit computes" in by_subject["two groups"]
    assert "two actors" not in by_subject


def test_packages_that_are_missing_or_too_old_are_named_with_what_to_do(monkeypatch):
    requirements = ["no-such-package>=3", "numpy<1", 'also-missing>=1; extra == "plot"', 'x; extra == "dev"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    python, missing, old, optional = doctor._installed()
    assert python.state is State.OK
    assert (missing.state, missing.found) == (State.FAULT, "not installed")
    assert missing.remedy == "pip install 'no-such-package>=3'"
    assert old.state is State.FAULT
    assert old.found.endswith("is not supported")
    assert optional.state is State.MISSING


def test_a_trial_that_fails_is_a_fault_with_the_end_of_its_error(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    assert main(["doctor", "--no-ray"]) == 1
    out = capsys.readouterr().out
    assert "FAULT    devices" in out
    assert "no_such_platform" in out
    assert "raise " not in out  # of JAX's code
    assert "unset JAX_PLATFORMS" in out
    assert out.splitlines()[-1] == "not well: devices, two groups"


def test_a_trial_that_hangs_is_a_fault(monkeypatch):
    monkeypatch.setattr(doctor, "TRIAL_SECONDS", 0.01)
    finding = doctor._trial("devices", "devices", remedy="wait")
    assert (finding.state, finding.remedy) == (State.FAULT, "wait")
    assert "has not ended within" in finding.found


def test_a_cache_that_others_may_write_to_is_a_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "CACHE", tmp_path / "cache")
    (finding,) = doctor._cache()
    assert finding.state is State.OK
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    (finding,) = doctor._cache()
    assert finding.state is State.FAULT
    assert f"chmod -R go-rwx {tmp_path / 'cache'}" in finding.remedy


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"mpmd {__version__}\n"
