"""``mpmd plan``: a step of the user's is planned, reported, explained and simulated."""

import dataclasses
import json
import logging
import re
import sys

import pytest

from mpmd.cli import progress
from mpmd.planner.cluster import Cluster

STEP = """
import jax, mpmd
from sizes import WIDTH

def loss_fn(params, x):
    return (mpmd.mark_stage_end(x @ params[0]) @ params[1]).sum()

def train_step(params, xs):
    grad = jax.value_and_grad(loss_fn)
    loss, grads = mpmd.treduce(lambda x: grad(params, x), xs, mpmd.Std1F1B(2), operation=mpmd.Add)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss

def shapes():
    weight = jax.numpy.zeros((WIDTH, WIDTH))
    return [weight, weight], jax.numpy.zeros((3, 2, WIDTH))

xs = jax.ShapeDtypeStruct((3, 2, WIDTH), "float32")
jitted = mpmd.jit(lambda xs: xs * 2, mpmd.AbstractMpmdMesh({"stage": 2}, "stage"))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A module of the user's, with another one beside it."""
    (tmp_path / "program.py").write_text(STEP)
    (tmp_path / "sizes.py").write_text("WIDTH = 1 << 22\n")  # whose square is too large for any memory
    yield tmp_path / "program.py"
    for name in ("program", "sizes"):
        sys.modules.pop(name, None)


@pytest.fixture
def plan(command):
    """As ``command``, without lines of progress."""

    def run(words, *arguments):
        code, out, err = command(f"plan {words}", *arguments)
        return code, out, re.sub(r"^\d+ s: .*\n", "", err, flags=re.MULTILINE)

    return run


@pytest.fixture
def step(program):
    return f"{program}:train_step --shapes {program}:shapes"


def test_a_train_step(plan, program, step):
    picture, trace = program.with_name("step.svg"), program.with_name("step.json")
    code, out, err = plan(f"{step} --groups 2 -o {picture} -o {trace}")
    assert (code, err) == (0, "")
    assert "planned in seconds" in out and "64.0 TiB" in out
    assert "args[0]" in out and "fwd_0" in out and "bubble" in out
    assert "<svg" in picture.read_text() and json.loads(trace.read_text())["traceEvents"]


def test_submeshes_share_what_arrays_shard(plan, step):
    sizes = "--groups 2 --submesh data=2 model=4"
    code, out, _ = plan(f"{step} {sizes}")
    slower = plan(f"{step} {sizes} --speed 1e11")[1]
    assert code == 0 and "on groups" in out
    assert ten_times(re.search(r"makespan (\S+)", out)[1]) == re.search(r"makespan (\S+)", slower)[1]


CLUSTER = {
    "nodes": 1,
    "devices_per_node": 2,
    "memory": 1e30,
    "flops": 1e12,
    "memory_bandwidth": 1e12,
    "device_link": {"latency": 1e-6, "bandwidth": 1e11},
    "node_link": {"latency": 1e-5, "bandwidth": 1e10},
}


def test_a_choice_for_a_cluster(plan, program, step):
    cluster = program.with_name("cluster.json")
    cluster.write_text(json.dumps(CLUSTER | {"node_link": {"latency": 0.0, "bandwidth": None}}))
    page, data, picture = (program.with_name(f"choice.{suffix}") for suffix in ("html", "json", "svg"))
    outputs = f"-o {page} -o {data} -o {picture}"
    code, out, err = plan(f"{step} --cluster {cluster} --memory 1e31 --groups 2 {outputs}")
    assert (code, err) == (0, "")
    assert "chosen: 2 groups of one device" in out and "why not" in out
    assert "<table>" in page.read_text() and "<svg" in picture.read_text()
    read = json.loads(data.read_text())
    assert read["cluster"]["memory"] == 1e31 and read["rows"][0]["candidate"]["groups"] == 2
    assert read["cluster"]["node_link"] == {"latency": 0.0, "bandwidth": None}
    described = Cluster.load(cluster)
    cluster.write_text(json.dumps(read["cluster"]))  # of a table, it describes one
    assert Cluster.load(cluster) == dataclasses.replace(described, memory=1e31)


def test_a_cluster_in_options(plan, step):
    numbers = "--nodes 1 --devices-per-node 2 --memory 1e30 --flops 1e12 --memory-bandwidth 1e12"
    links = "--device-link 1e-6 1e11 --node-link 1e-5 1e10 --schedule gpipe --no-remat"
    code, out, _ = plan(f"{step} {numbers} {links}")
    assert code == 0 and "GPipe, 3 microbatches" in out
    code, _, err = plan(f"{step} {numbers} {links} --schedule Best")
    assert code == 2 and "one of the families GPipe" in err
    code, _, err = plan(f"{step} {numbers}")
    assert code == 2 and "device_link must be given where there are 2 devices on a node" in err


def test_a_preset_with_other_numbers(plan, program, step):
    table = program.with_name("choice.json")
    preset = f"{step} --preset a100-80gb"
    changed = "--memory 1e30 --no-overlaps-gathers --kernel-floor 1e-6 --devices-per-node 2"
    effort = f"--simulate 1 --seconds 60 -o {table}"
    code, _, err = plan(f"{preset} {changed} {effort}", "--rate", "product bfloat16", "1e14", "2e10")
    assert (code, err) == (0, "")
    cluster = json.loads(table.read_text())["cluster"]
    assert (cluster["kind"], cluster["memory"], cluster["kernel_floor"]) == ("A100", 1e30, 1e-6)
    assert cluster["rates"]["product bfloat16"] == {"rate": 1e14, "half": 2e10}
    assert not cluster["overlaps_gathers"] and "batched_product bfloat16" in cluster["rates"]
    for more, message in [
        (("--remat-policy", "none", "--remat"), "--remat-policy says what --remat and --no-remat say"),
        (("--remat-policy", "dots_saveable"), "put jax.checkpoint around its own layers"),
        (("--rate", "sum bfloat16", "1", "0"), "'sum bfloat16' is none of product"),
        (("--rate", "product bfloat16", "fast", "0"), "--rate: 'fast' is not a number"),
        (("--cluster", "cluster.json"), "--cluster and --preset both describe the cluster"),
    ]:
        code, _, err = plan(preset, *more)
        assert code == 2 and message in err


def test_the_planner_says_every_second_what_it_does(capsys, monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.001)
    with progress.progress_lines():
        logging.getLogger("mpmd.planner.rerank").debug("planning candidate %d of at most %d", 1, 3)
        while "planning" not in (err := capsys.readouterr().err):
            pass
    assert err.splitlines()[-1].endswith(" s: planning candidate 1 of at most 3")


def test_a_cluster_of_several_kinds_of_devices(plan, program, step):
    cluster = program.with_name("cluster.json")
    pools = [CLUSTER | {"kind": "A100"}, CLUSTER | {"kind": "H100", "flops": 2e12}]
    cluster.write_text(json.dumps({"pools": pools, "link": {"latency": 1e-5, "bandwidth": 1e10}}))
    of_pools = f"{step} --cluster {cluster} --groups 1"
    code, out, err = plan(of_pools)
    assert (code, err) == (0, "") and " of H100" in out
    code, _, err = plan(f"{of_pools} --memory 1e31")
    assert code == 2 and "--memory: " in err and "has a cluster of several kinds of devices" in err
    cluster.write_text(json.dumps({"pools": pools}))
    code, _, err = plan(of_pools)
    assert code == 2 and "link must be given between 2 pools" in err


def test_arguments_that_the_step_does_not_take(plan, program):
    code, _, err = plan(f"{program}:train_step --shapes {program}:xs --groups 2")
    assert code == 2 and "cannot be called with what" in err and "a tuple of 1: missing a required" in err


def ten_times(number):
    return f"{10 * float(number):.4g}"


def test_modules_beside_the_caller(plan, program, monkeypatch):
    monkeypatch.chdir(program.parent)
    code, out, err = plan("program:jitted --shapes program:xs")
    assert (code, err) == (0, "")
    assert "args[0]" in out


def test_a_file_that_is_called_like_a_module(plan, program):
    """It does not take the place of the module, which others import."""
    json_file = program.with_name("json.py")
    json_file.write_text(STEP)
    code, out, err = plan(f"{json_file}:jitted --shapes {json_file}:xs")
    assert (code, err) == (0, "") and "args[0]" in out
    assert sys.modules.pop(str(json_file)).xs.shape and sys.modules["json"] is json


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{0}:train_step --shapes {0}:shapes", "has no mesh: say for how many groups"),
        ("{0}:jitted --shapes {0}:xs --groups 2", "has a mesh of its own"),
        ("{0}:jitted --shapes {0}:xs --nodes 2", "has a mesh of its own: name the train step"),
        ("{0}:jitted --shapes {0}:xs --fsdp", "--fsdp: there is nothing to choose without"),
        ("{0}:xs --shapes {0}:xs", "is of type ShapeDtypeStruct, and not a step"),
        ("{0}:step --shapes {0}:xs", "has no 'step'"),
        ("{0}:jitted --shapes {0}:xs --speed 0", "operations_per_second must be a number above 0"),
        ("{0}:jitted --shapes shapes", "write module:name"),
        ("{0}:jitted --shapes nowhere.py:xs", "there is no file"),
        ("{0}:jitted --shapes nowhere:xs", "No module named 'nowhere'"),
        ("{0}:train_step --shapes {0}:shapes --groups 1", "2 groups"),
        ("{0}:jitted --shapes {0}:xs --groups 2 --submesh data", "such as data=2"),
    ],
)
def test_wrong_usage(plan, program, arguments, message):
    code, _, err = plan(arguments.format(program))
    assert code == 2 and message in err
