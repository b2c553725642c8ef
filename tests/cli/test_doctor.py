"""``mpmd doctor``: what it finds, and what it says about faults."""

from __future__ import annotations

import json
import socket
import subprocess

import pytest

from mpmd.cli import doctor, machine
from mpmd.cli.doctor import Health
from mpmd.version import __version__


def printed_by_a_trial(monkeypatch, **printed):
    done = subprocess.CompletedProcess([], 0, json.dumps({"text": "a step", "devices": [], **printed}), "")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *arguments, **options: done)


def test_what_is_installed_here_is_well(command, monkeypatch):
    printed_by_a_trial(monkeypatch)
    code, out, _ = command("doctor --no-ray")
    lines = out.splitlines()
    assert code == 0 and lines[-1] == "all is well"
    by_subject = {line[9:29].strip(): line for line in lines[:-2]}
    assert __version__ in by_subject["mpmd"] and "a step" in by_subject["two groups"]
    assert "two actors" not in by_subject


@pytest.mark.slow
def test_a_trial_that_fails_is_a_fault_with_the_end_of_its_error(command, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    code, out, _ = command("doctor --no-ray")
    assert code == 1
    assert "FAULT    devices" in out
    assert "no_such_platform" in out
    assert "raise " not in out  # of JAX's code
    assert "unset JAX_PLATFORMS" in out
    assert out.splitlines()[-1] == "not well: devices, two groups"


def test_executables_that_do_not_repeat_their_bits_are_a_warning(monkeypatch):
    printed_by_a_trial(monkeypatch, other_bits=["[0][1]"])
    finding = doctor._trial("two groups", "in-process", remedy="")
    assert (finding.state, finding.data) == (Health.WARNING, {"devices": []})
    assert "repeat their bits" in finding.remedy


def test_a_trial_that_hangs_is_a_fault(monkeypatch):
    monkeypatch.setattr(doctor, "TRIAL_SECONDS", 0.01)
    finding = doctor._trial("devices", "devices", remedy="wait")
    assert (finding.state, finding.remedy) == (Health.FAULT, "wait")
    assert "has not ended within" in finding.found


def test_a_cache_that_others_may_write_to_is_a_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "CACHE", tmp_path / "cache")
    (finding,) = doctor._cache()
    assert finding.state is Health.OK
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    (finding,) = doctor._cache()
    assert finding.state is Health.FAULT
    assert f"chmod -R go-rwx {tmp_path / 'cache'}" in finding.remedy


def test_the_version(command):
    assert command("--version")[:2] == (0, f"mpmd {__version__}\n")


def test_top_names_what_is_in_its_place(command):
    code, _, err = command("top --once")
    assert code == 2
    assert "there is no `mpmd top` any more: in the program, print(mesh.status())" in err


# For programs.

FIELDS = {
    "devices": {"platform", "kind"},
    "gpus": {"index", "name", "memory_bytes", "driver"},
    "nodes": {"address", "host", "cpus", "gpus", "memory_bytes"},
    "findings": {"subject", "state", "text", "remedy"},
}


def check_fields(printed):
    assert list(printed) == "format ok mpmd findings devices gpus ports nodes".split()
    for name, fields in FIELDS.items():
        assert all(entry.keys() == fields for entry in printed[name])
    assert {finding["state"] for finding in printed["findings"]} <= {"ok", "warning", "fault"}


@pytest.mark.slow
def test_json_has_the_findings_devices_and_ports(command):
    code, out, _ = command("doctor --no-ray --json")
    assert code == 0
    printed = json.loads(out)
    check_fields(printed)
    assert printed["ok"] is True and printed["format"] == "mpmd doctor 1" and printed["mpmd"] == __version__
    texts = {finding["subject"]: finding["text"] for finding in printed["findings"]}
    assert {"mpmd", "ports", "devices"} <= texts.keys()
    assert "computes what jax.jit computes, and the same bits again" in texts["two groups"]
    assert printed["devices"][0]["platform"] == "cpu"
    assert printed["ports"]["first"] < printed["ports"]["last"]
    assert [port["port"] for port in printed["ports"]["ray"]] == [6379, 8265, 10001]
    assert printed["nodes"] == []


def test_a_port_at_which_a_process_listens(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(machine, "RAY_PORTS", {port: "head node"})
        (finding,) = doctor._ports()
        assert finding.found.endswith(f"Ray listens at {port}")
        assert finding.data["ports"]["ray"] == [{"port": port, "use": "head node", "listens": True}]
    (finding,) = doctor._ports()
    assert finding.found.endswith("no Ray listens")


def nvidia_smi(tmp_path, monkeypatch, script):
    """Has a script stand for the driver's program."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(machine, "NVIDIA_SMI", str(program))


TWO = "echo '0, NVIDIA H100, 81559, 580.10'; echo '1, NVIDIA GB10, [N/A], 580.10'"


@pytest.mark.parametrize(("platform", "state"), [("cpu", Health.WARNING), ("gpu", Health.OK)])
def test_gpus_that_jax_does_not_use_are_a_warning(platform, state, tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, TWO)
    devices = doctor.Diagnosis(
        "devices", Health.OK, "", data={"devices": [{"platform": platform, "kind": ""}]}
    )
    (finding,) = doctor._gpus(devices)
    assert finding.state is state and ("jax[cuda12]" in finding.remedy) == (platform == "cpu")
    assert finding.data["gpus"] == [
        {"index": 0, "name": "NVIDIA H100", "memory_bytes": 81559 * 2**20, "driver": "580.10"},
        {"index": 1, "name": "NVIDIA GB10", "memory_bytes": 0, "driver": "580.10"},
    ]
    assert "1 of NVIDIA H100, 79.6 GiB" in finding.found


def test_a_driver_that_does_not_answer_is_a_warning(tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, "echo 'Failed to initialize NVML'; exit 9")
    (finding,) = doctor._gpus(doctor.Diagnosis("devices", Health.OK, ""))
    assert (finding.state, finding.found) == (Health.WARNING, "Failed to initialize NVML")


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch):
    monkeypatch.setattr(machine, "NVIDIA_SMI", "no-such-program")
    assert [*doctor._gpus(doctor.Diagnosis("devices", Health.OK, ""))] == []
