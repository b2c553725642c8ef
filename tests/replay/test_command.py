"""``mpmd replay``: what it prints, its exit codes, and its comparison of two machines."""

import dataclasses
import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from mpmd.errors import NonFiniteError
from mpmd.replay import load
from mpmd.replay.environment import variables_of
from mpmd.replay.record import read_task
from tests.support.hostile_modules import BODIES, with_function
from tests.support.only_jax import ROOT
from tests.support.planted_nans import line_of, optimizer, run


@pytest.fixture(scope="session")
def with_nan(tmp_path_factory):
    directory = tmp_path_factory.mktemp("captured")
    with pytest.raises(NonFiniteError):
        run(optimizer(), directory)
    return next(directory.iterdir())


def test_a_task_that_is_well(command, small):
    code, text, _ = command("replay", small[0] / "bwd_1__0")
    assert code == 0
    assert "all have the recorded bits" in text and "no result has a NaN" in text


def test_a_task_with_a_nan(command, with_nan):
    code, text, _ = command("replay", with_nan)
    assert code == 1
    assert f"planted_nans.py:{line_of('optimizer')}" in text
    assert "the first equation that makes a NaN:" in text and "of float32[4,4], 0" in text
    code, text, _ = command("replay", with_nan, "--json")
    assert code == 1 and json.loads(text)["evaluation"]["first"]["kind"] == "NaN"


def test_a_walk_that_has_stopped_is_said_to_have(command, tmp_path, monkeypatch):
    monkeypatch.setattr("mpmd.capture.walk._MOST_SECONDS", 0)
    with pytest.raises(NonFiniteError):
        run(optimizer(), tmp_path)
    code, text, _ = command("replay", next(tmp_path.iterdir()))
    assert code == 0 and "0 equations were evaluated" in text
    assert "stopped after 0 s; what follows was not evaluated either" in text
    assert "no equation that was evaluated makes a NaN" in text


def test_two_machines_with_the_same_bits_and_with_others(command, small, tmp_path):
    task, digests = small[0] / "fwd_0__1", tmp_path / "digests.json"
    assert command("replay", task, "--digests", digests)[0] == 0
    code, text, _ = command("replay", task, "--against", digests)
    assert code == 0 and "results with other bits than on the other machine: none" in text
    of_values = json.loads(digests.read_text())
    name = load(task).record.results[0].name
    digests.write_text(json.dumps({**of_values, name: "0" * 32}))
    code, text, _ = command("replay", task, "--against", digests)
    assert code == 1 and f"results with other bits than on the other machine: {name}" in text
    assert json.loads(command("replay", task, "--against", digests, "--json")[1])["other_machine"] == [name]


def test_digests_of_another_task(command, small, tmp_path):
    digests = tmp_path / "digests.json"
    assert command("replay", small[0] / "fwd_0__1", "--digests", digests)[0] == 0
    code, _, error = command("replay", small[0] / "bwd_1__0", "--against", digests)
    assert code == 2 and "the digests are those of another task" in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "has no digests"),
        ("no JSON", "is damaged"),
        ('[["equation 0 cosh", "0"]]', "has no digests"),
        ('{"w": 1}', "has no digests"),
    ],
)
def test_digests_of_something_else(command, small, tmp_path, content, message):
    digests = tmp_path / "digests.json"
    digests.write_text(content)
    code, _, error = command("replay", small[0] / "fwd_0__1", "--against", digests)
    assert code == 2 and message in error


def damaged(directory, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    change(copy)
    return copy


def rewritten(file, change):
    def rewrite(directory):
        (directory / file).write_bytes(change((directory / file).read_bytes()))

    return rewrite


def with_a_changed_value(data):
    position = data.index(b"NUMPY") + 128 + 2  # in the first array, after numpy's header
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def without(name):
    return lambda directory: (directory / name).unlink()


def with_a_pipe(directory):
    (directory / "task.json").unlink()
    os.mkfifo(directory / "task.json")


def of_another_archive(write):
    """Writes ``inputs.npz`` once more: ``write`` gets an open archive, and each array with its name."""

    def rewrite(directory):
        with np.load(directory / "inputs.npz") as arrays:
            values = dict(arrays)
        with zipfile.ZipFile(directory / "inputs.npz", "w") as archive:
            for name, array in values.items():
                write(archive, name, array)

    return rewrite


def written(archive, name, array):
    content = io.BytesIO()
    np.save(content, array)
    archive.writestr(f"{name}.npy", content.getvalue())


def with_compression(archive, name, array):
    archive.writestr(f"{name}.npy", bytes(2**20), zipfile.ZIP_DEFLATED)


def changed(name, value):
    def change(directory):
        data = json.loads((directory / "task.json").read_text())
        if name in data["inputs"][0]:
            data["inputs"][0][name] = value
        elif name.startswith("result_"):
            data["results"][0] |= {name.removeprefix("result_"): value, "is_stored": False}
        else:
            data[name] = value
        (directory / "task.json").write_text(json.dumps(data))

    return change


BOMB = bytes(2**26 + 1)
"""Of few bytes when it is compressed."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("format", 4), "has the format 4, which mpmd '"),
        (changed("format", 2), "replay it with the version that wrote it, or capture"),
        (without("task.json"), "is no directory of a captured task"),
        (without("inputs.npz"), "inputs.npz: No such file"),
        (without("results.npz"), "results.npz: No such file"),
        (without("task.mlir"), "task.mlir: No such file"),
        (with_a_pipe, "task.json is damaged: it is no regular file"),
        (lambda directory: (directory / "task.json").write_bytes(BOMB), "it has more than 64 MiB"),
        (changed("dtype", "object"), "no dtype 'object'"),
        (changed("shape", [10**30]), "inputs.npz is damaged: it has "),
        (changed("shape", [-1]), "no array has the shape"),
        (changed("name", "../task.json"), "no item named '../task.json.npy'"),
        (changed("submesh", [["data", 0]]), "no group has the devices"),
        (changed("evaluation", 3), "task.json is damaged: evaluation"),
        (changed("result_shape", [3, 3, 3]), "cannot run with JAX"),
        (rewritten("inputs.npz", with_a_changed_value), "inputs.npz is damaged: Bad CRC-32"),
        (rewritten("inputs.npz", lambda data: data[:-4]), "inputs.npz is damaged"),
        (of_another_archive(lambda *args: None), "inputs.npz is damaged"),
        (of_another_archive(with_compression), "is compressed"),
        (of_another_archive(lambda a, n, v: written(a, n, v.astype(object))), "as task.json says"),
        (rewritten("task.mlir", lambda data: BOMB), "it has more than 64 MiB"),
        (rewritten("task.mlir", lambda data: data[: len(data) // 2]), "cannot run with JAX"),
    ],
)
def test_a_damaged_directory(command, small, tmp_path, change, message):
    code, text, error = command("replay", damaged(small[0] / "fwd_0__1", tmp_path, change))
    assert (code, text) == (2, "") and message in error


@pytest.mark.parametrize("refused", BODIES)
def test_code_that_may_do_more_than_compute_is_refused(command, small, tmp_path, refused):
    change = rewritten("task.mlir", lambda data: with_function(data, BODIES[refused]))
    code, text, error = command("replay", damaged(small[0] / "fwd_0__1", tmp_path, change))
    assert (code, text) == (2, "") and refused in error and "task.mlir" in error


def test_code_with_calls_that_are_stable_runs(command, small, tmp_path):
    stable = "%1 = stablehlo.custom_call @Sharding(%0) : (tensor<f32>) -> tensor<f32>"
    change = rewritten("task.mlir", lambda data: with_function(data, stable))
    assert command("replay", damaged(small[0] / "fwd_0__1", tmp_path, change))[0] == 0


def test_a_task_of_more_threads_or_devices_than_a_process_has(command, small, tmp_path):
    with_threads = damaged(small[0] / "fwd_0__1", tmp_path, changed("environment", {"NPROC": "9999"}))
    code, _, error = command("replay", with_threads)
    assert code == 2 and "task.json is damaged" in error and "NPROC='9999'" in error
    with_devices = tmp_path / "devices"
    with_threads.rename(with_devices)
    changed("environment", {})(with_devices)
    changed("submesh", [["data", 65536]])(with_devices)
    code, _, error = command("replay", with_devices)
    assert code == 2 and "no group has the devices" in error


@pytest.mark.slow
def test_an_option_that_xla_does_not_know_is_no_fault_of_the_task(small, tmp_path):
    """XLA ends its process with 1, which would mean that a result differs."""
    versions = load(small[0] / "fwd_0__1").record.versions
    directory = damaged(small[0] / "fwd_0__1", tmp_path, lambda copy: None)
    changed("environment", {"XLA_FLAGS": "--xla_of_somebody_else=1"})(directory)
    assert versions["jaxlib"] == importlib.metadata.version("jaxlib")
    done = subprocess.run(
        [sys.executable, "-m", "mpmd", "replay", directory], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "") and "--xla_of_somebody_else=1" in done.stderr


def test_what_was_found_is_printed_where_the_task_cannot_run(command, with_nan, tmp_path):
    on_gpu = damaged(with_nan, tmp_path, changed("platform", "cuda"))
    code, text, _ = command("replay", on_gpu)
    assert code == 1 and "the task runs on cuda, and JAX has cpu devices here" in text
    assert f"planted_nans.py:{line_of('optimizer')}" in text
    code, _, error = command("replay", on_gpu, "--digests", tmp_path / "digests.json")
    assert code == 2 and "two machines cannot be compared" in error


def test_no_directory(command, tmp_path):
    assert command("replay", tmp_path / "none")[0] == 2


def test_variables_are_those_of_the_group(small):
    record = read_task(small[0] / "fwd_0__1")
    here = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --mine"}
    same = variables_of(record, here, record.versions["jaxlib"])
    flags = same["XLA_FLAGS"].split()
    assert flags[0] == "--mine" and flags[-1] == "--xla_force_host_platform_device_count=1"
    assert "--xla_backend_optimization_level=0" in flags and len(flags) == len(set(flags))
    assert same["JAX_PLATFORMS"] == "cpu"
    other = variables_of(record, here, "0.0.1")
    assert other["XLA_FLAGS"] == "--mine --xla_force_host_platform_device_count=1"


@pytest.mark.parametrize(
    "flag",
    [
        "--xla_dump_to=dumped",
        "--xla_gpu_cuda_data_dir=tools",
        "--xla_gpu_load_autotune_results_from=here",
        "--xla_backend_extra_options=-stats",
        "--xla_new_option=/home/somebody",
        "/home/somebody/flags",
    ],
)
def test_a_directory_sets_no_option_that_names_a_file(small, flag):
    record = read_task(small[0] / "fwd_0__1")
    record = dataclasses.replace(record, environment={"XLA_FLAGS": f"{flag} --xla_keep=1", "NPROC": "a"})
    variables = variables_of(record, {}, record.versions["jaxlib"])
    assert variables["XLA_FLAGS"] == "--xla_keep=1 --xla_force_host_platform_device_count=1"
    assert "NPROC" not in variables


def test_control_characters_are_escaped(command, with_nan, tmp_path):
    hostile = "\x1b[2J\u202egone\n"

    def change(directory):
        data = json.loads((directory / "task.json").read_text())
        data["error"] = data["results"][0]["name"] = data["evaluation"]["first"]["source"]["line"] = hostile
        data["results"][0]["is_stored"] = False
        (directory / "task.json").write_text(json.dumps(data))

    directory = damaged(with_nan, tmp_path, change)
    code, text, _ = command("replay", directory)
    assert code == 1 and "it had failed: \\x1b[2J\\u202egone" in text
    assert "  \\x1b[2J" in text and all(line.isprintable() for line in text.splitlines())
    assert repr(load(directory)).isprintable()
    changed("name", hostile)(directory)
    code, _, error = command("replay", directory)
    assert code == 2 and "\\x1b[2J" in error and "\x1b" not in error
