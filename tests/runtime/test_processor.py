"""The model of the processor, by which processes are compared that may rightly compute different bits."""

import pathlib

import pytest

from mpmd.runtime import digests

ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd sve
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1

processor\t: 1
BogoMIPS\t: 243.75
Features\t: fp asimd sve
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""


@pytest.mark.parametrize(
    ("cpuinfo", "processor"),
    [
        ("processor : 0\nmodel name : A 1\nflags : fma\n", "model name : A 1; flags : fma"),
        (
            ARM,
            "Features\t: fp asimd sve; CPU implementer\t: 0x41; CPU architecture: 8; CPU variant\t: 0x1; "
            "CPU part\t: 0xd40; CPU revision\t: 1",
        ),
        ("processor : 0\n", "machine"),
        (None, "machine"),
    ],
)
def test_the_model_is_told_on_every_machine(monkeypatch, cpuinfo, processor):
    def read_text(path):
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    monkeypatch.setattr(pathlib.Path, "read_text", read_text)
    monkeypatch.setattr(digests.platform, "processor", lambda: "")
    monkeypatch.setattr(digests.platform, "machine", lambda: "machine")
    assert digests._processor() == processor
