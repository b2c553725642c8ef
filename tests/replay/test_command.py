"""``mpmd replay``: what it prints, its exit codes, and its comparison of two machines."""

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from mpmd.cli.main import main
from mpmd.errors import NonFiniteError
from mpmd.replay import load
from mpmd.replay.environment import variables_of
from mpmd.replay.files import read_task
from tests.support.hostile_modules import BODIES, with_function
from tests.support.only_jax import ROOT, without_others
from tests.support.planted_nans import line_of, optimizer, run


def replay(capsys, *arguments):
    """The exit code, and what is printed and what is said about errors."""
    code = main(["replay", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.fixture(scope="session")
def with_nan(tmp_path_factory):
    directory = tmp_path_factory.mktemp("captured")
    with pytest.raises(NonFiniteError):
        run(optimizer(), directory)
    return next(directory.iterdir())


def test_a_task_that_is_well(capsys, small):
    code, text, _ = replay(capsys, small[0] / "bwd_1__0")
    assert code == 0
    assert "all have the recorded bits" in text and "no equation makes a NaN" in text


def test_a_task_with_a_nan(capsys, with_nan):
    code, text, _ = replay(capsys, with_nan)
    assert code == 1
    assert f"planted_nans.py:{line_of('optimizer')}" in text
    assert "the first equation that makes a NaN:" in text and "of float32[4,4], 0" in text
    code, text, _ = replay(capsys, with_nan, "--json")
    assert code == 1 and json.loads(text)["first"]["kind"] == "NaN"


def test_two_machines_with_the_same_bits_and_with_others(capsys, small, tmp_path):
    task, digests = small[0] / "fwd_0__1", tmp_path / "digests.json"
    assert replay(capsys, task, "--digests", digests)[0] == 0
    code, text, _ = replay(capsys, task, "--against", digests)
    assert code == 0 and "all equations make the bits of the other machine" in text
    pairs = json.loads(digests.read_text())
    position = next(i for i, (path, _) in enumerate(pairs) if "tanh" in path)
    pairs[position][1] = "0" * 32
    digests.write_text(json.dumps(pairs))
    code, text, _ = replay(capsys, task, "--against", digests)
    assert code == 1
    assert (
        "the first equation that makes other bits" in text and "tanh" in text and "captured_tasks.py" in text
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "has no digests"), ("no JSON", "is damaged"), ('[["equation 0 cosh", "0"]]', "of another task")],
)
def test_digests_of_something_else(capsys, small, tmp_path, content, message):
    digests = tmp_path / "digests.json"
    digests.write_text(content)
    code, _, error = replay(capsys, small[0] / "fwd_0__1", "--against", digests)
    assert code == 2 and message in error


def damaged(directory, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    change(copy)
    return copy


def of_a_later_format(directory):
    data = json.loads((directory / "task.json").read_text())
    (directory / "task.json").write_text(json.dumps({**data, "format": 3}))


def cut_short(directory):
    path = directory / "inputs.bin"
    path.write_bytes(path.read_bytes()[:-4])


def with_a_changed_value(directory):
    path = directory / "inputs.bin"
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def without(name):
    return lambda directory: (directory / name).unlink()


def with_a_pipe(directory):
    (directory / "task.json").unlink()
    os.mkfifo(directory / "task.json")


def rewritten(change):
    """Writes the files of ``equations.zip`` once more, changed."""

    def rewrite(directory):
        with zipfile.ZipFile(directory / "equations.zip") as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        change(files)
        with zipfile.ZipFile(directory / "equations.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)

    return rewrite


def with_equations(change):
    def rewrite(files):
        data = json.loads(files["equations.json"])
        change(data)
        files["equations.json"] = json.dumps(data).encode()

    return rewritten(rewrite)


def first_export(data):
    return next(each["Export"] for each in data["exports"] if each["Export"]["function"] != "main")


def with_other_shapes(data):
    for each in data["exports"]:
        for kind in each["Export"]["inputs"]:
            kind[1] = [3, *kind[1]]


def with_huge_results(data):
    for each in data["exports"]:
        for kind in each["Export"]["outputs"]:
            kind[1] = [2**40]


def with_code_cut_short(files):
    files |= {name: data[: len(data) // 2] for name, data in files.items() if name.endswith(".mlir")}


def nested(files):
    start = (
        '{"inputs":[],"outputs":[],"equations":[{"Conditional":{"source":0,"reads":[],"makes":[],"branches":['
    )
    block = start * 300 + '{"inputs":[],"outputs":[],"equations":[]}' + "]}}]}" * 300
    files["equations.json"] = f'{{"sources":[],"exports":[],"executable":null,"block":{block}}}'.encode()


def with_flipped_bits(directory):
    path = directory / "equations.zip"
    data = bytearray(path.read_bytes())
    data[200:240] = bytes(byte ^ 255 for byte in data[200:240])
    path.write_bytes(data)


def half_of_the_zip(directory):
    path = directory / "equations.zip"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed(name, value):
    def change(directory):
        data = json.loads((directory / "task.json").read_text())
        if name in data["inputs"][0]:
            data["inputs"][0][name] = value
        else:
            data[name] = value
        (directory / "task.json").write_text(json.dumps(data))

    return change


BOMB = bytes(2**26 + 1)
"""Of few bytes when it is compressed."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_a_later_format, "has the format 3, and this version of mpmd reads format 2"),
        (cut_short, "inputs.bin is damaged: it has "),
        (with_a_changed_value, "has other bytes than were written"),
        (without("task.json"), "is no directory of a captured task"),
        (without("inputs.bin"), "inputs.bin: No such file"),
        (without("results.bin"), "results.bin: No such file"),
        (without("equations.zip"), "equations.zip: No such file"),
        (with_a_pipe, "task.json is damaged: it is no regular file"),
        (lambda directory: (directory / "task.json").write_bytes(BOMB), "it has more than 64 MiB"),
        (lambda directory: (directory / "task.json").write_text("[" * 200000), "task.json is damaged"),
        (changed("dtype", "object"), "no dtype 'object'"),
        (changed("dtype", "finfo"), "no dtype 'finfo'"),
        (changed("shape", [10**30]), "inputs.bin is damaged: it has "),
        (changed("shape", [0, 10**30]), "inputs.bin is damaged"),
        (changed("shape", [-1]), "no array has the shape"),
        (changed("submesh", [["data", 0]]), "no group has the devices"),
        (changed("submesh", [["data", 10**30]]), "no group has the devices"),
        (half_of_the_zip, "equations.zip is damaged"),
        (with_flipped_bits, "equations.zip is damaged"),
        (rewritten(lambda files: files.pop("equations.json")), "equations.zip is damaged: equations.json"),
        (rewritten(lambda files: files.update({"equations.json": BOMB})), "it has more than 64 MiB"),
        (rewritten(lambda files: files.update({"0.mlir": BOMB})), "it has more than 64 MiB"),
        (rewritten(lambda files: files.pop("0.mlir")), "no item named '0.mlir'"),
        (rewritten(with_code_cut_short), "cannot run with JAX"),
        (with_equations(lambda data: data.update(sources=3)), "equations.zip is damaged"),
        (rewritten(nested), "equations.zip is damaged"),
        (with_equations(with_other_shapes), "cannot run with JAX"),
        (with_equations(with_huge_results), "cannot run with JAX"),
        (with_equations(lambda data: first_export(data).update(function="_")), "cannot run with JAX"),
        (with_equations(lambda data: first_export(data).update(file="../task.json")), "no item named"),
        (with_equations(lambda data: first_export(data).update(file="/etc/passwd")), "no item named"),
    ],
)
def test_a_damaged_directory(capsys, small, tmp_path, change, message):
    code, text, error = replay(capsys, damaged(small[0] / "fwd_0__1", tmp_path, change))
    assert (code, text) == (2, "") and message in error


@pytest.mark.parametrize("refused", BODIES)
@pytest.mark.parametrize("of", ["the executable", "one equation"])
def test_code_that_may_do_more_than_compute_is_refused(capsys, small, tmp_path, refused, of):
    exports = load(small[0] / "fwd_0__1").equations.exports
    (file,) = {each.file for each in exports if (each.function == "main") == (of == "the executable")}

    def change(files):
        files[file] = with_function(files[file], BODIES[refused])

    code, text, error = replay(capsys, damaged(small[0] / "fwd_0__1", tmp_path, rewritten(change)))
    assert (code, text) == (2, "") and refused in error and file in error


def test_code_with_calls_that_are_stable_runs(capsys, small, tmp_path):
    stable = "%1 = stablehlo.custom_call @Sharding(%0) : (tensor<f32>) -> tensor<f32>"

    def change(files):
        files |= {name: with_function(data, stable) for name, data in files.items() if name.endswith(".mlir")}

    assert replay(capsys, damaged(small[0] / "fwd_0__1", tmp_path, rewritten(change)))[0] == 0


def test_a_task_of_more_threads_or_devices_than_a_process_has(capsys, small, tmp_path):
    with_threads = damaged(small[0] / "fwd_0__1", tmp_path, changed("environment", {"NPROC": "9999"}))
    code, _, error = replay(capsys, with_threads)
    assert code == 2 and "task.json is damaged" in error and "NPROC='9999'" in error
    with_devices = tmp_path / "devices"
    with_threads.rename(with_devices)
    changed("environment", {})(with_devices)
    changed("submesh", [["data", 65536]])(with_devices)
    code, _, error = replay(capsys, with_devices)
    assert code == 2 and "no group has the devices" in error


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


@pytest.mark.parametrize("name", ["pipe", "large", "deep"])
def test_digests_that_are_no_file_of_digests(capsys, small, tmp_path, name):
    path = tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
    elif name == "large":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        path.write_text("[" * 500 + "]" * 500)
    code, text, error = replay(capsys, small[0] / "fwd_0__1", "--against", path)
    assert (code, text) == (2, "") and f"{path} is damaged: it " in error


def test_a_task_of_a_gpu_is_evaluated_without_one(capsys, small, monkeypatch):
    def without_gpu(path):
        task = load(path)
        exports = list(task.equations.exports)
        exports[task.equations.executable] = dataclasses.replace(
            exports[task.equations.executable], platforms=("cuda",)
        )
        task.equations = dataclasses.replace(task.equations, exports=tuple(exports))
        return task

    monkeypatch.setattr("mpmd.replay.captured_task.load", without_gpu)
    code, text, _ = replay(capsys, small[0] / "fwd_0__1")
    assert code == 0 and "the task runs on cuda, and JAX has cpu devices here" in text
    assert "no equation makes a NaN" in text


def test_no_directory(capsys, tmp_path):
    assert replay(capsys, tmp_path / "none")[0] == 2


def test_the_command_needs_jax_and_numpy_alone(with_nan):
    program = f"{without_others()}\nfrom mpmd.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "replay", with_nan, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert result["first"]["line"].startswith(str(ROOT / "tests/support/planted_nans.py"))
    assert result["differences"] == []


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


def test_control_characters_are_escaped(capsys, small, tmp_path):
    hostile = "\x1b[2J\u202egone\n"

    def change(directory):
        changed("error", hostile)(directory)
        changed("name", hostile)(directory)
        with_equations(lambda data: [source.update(line=hostile) for source in data["sources"]])(directory)

    directory = damaged(small[0] / "fwd_0__1", tmp_path, change)
    pairs = tmp_path / "digests.json"
    replay(capsys, directory, "--digests", pairs)
    digests = json.loads(pairs.read_text())
    digests[0][1] = ""
    pairs.write_text(json.dumps(digests))
    code, text, _ = replay(capsys, directory, "--against", pairs)
    assert code == 1 and "it had failed: \\x1b[2J\\u202egone" in text
    assert "  \\x1b[2J" in text and all(line.isprintable() for line in text.splitlines())
    assert repr(load(directory)).isprintable()
    with_a_changed_value(directory)
    code, _, error = replay(capsys, directory)
    assert code == 2 and "\\x1b[2J" in error and "\x1b" not in error
