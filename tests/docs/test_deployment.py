"""The files of ``examples/deploy`` are what Ray, KubeRay and a shell accept.

``kuberay_rayjob.json`` is KubeRay's definition of a RayJob without its descriptions; an object in it has no
field that it does not name, and one that occurs several times is a definition.
"""

import copy
import json
import pathlib
import re
import subprocess
import sys

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deploy"
PAGE = (ROOT / "docs" / "clusters.md").read_text()
RAY_UP = yaml.safe_load((FOLDER / "ray_up.yaml").read_text())
KUBERAY = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
RAY_SCHEMA = json.loads((pathlib.Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
JOB_SCHEMA = json.loads((pathlib.Path(__file__).parent / "kuberay_rayjob.json").read_text())
JOBS = jsonschema.validators.validator_for(JOB_SCHEMA)(JOB_SCHEMA)


def test_the_page_shows_every_file():
    assert {*re.findall(r"\]\(\S*examples/deploy/(\S+?)\)", PAGE)} == {path.name for path in FOLDER.iterdir()}
    assert {*re.findall(r"\{literalinclude\} \S*/(\S+)", PAGE)} == {path.name for path in FOLDER.iterdir()}


def test_ray_takes_the_cluster_of_ray_up():
    jsonschema.validate(RAY_UP, RAY_SCHEMA)
    validate_config(prepare_config(copy.deepcopy(RAY_UP)))  # as `ray up` does, with its defaults


@pytest.mark.parametrize("name", [name for name in RAY_UP if name.endswith("_commands")])
def test_commands_of_ray_up_are_of_a_shell(name):
    for command in RAY_UP[name]:
        subprocess.run(["bash", "-n", "-c", command], check=True)


def test_the_manifest_is_a_job_of_kuberay():
    JOBS.check_schema(JOB_SCHEMA)
    JOBS.validate(KUBERAY)
    assert (KUBERAY["apiVersion"], KUBERAY["kind"]) == ("ray.io/v1", "RayJob")


def test_the_job_of_slurm_is_a_script_without_findings():
    shellcheck = pathlib.Path(sys.executable).parent / "shellcheck"
    subprocess.run([shellcheck, FOLDER / "slurm.sh"], check=True)


def test_clusters_have_a_token():
    """Without one, whoever reaches a cluster can run programs on it."""
    assert KUBERAY["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert "RAY_AUTH_MODE=token" in " ".join(RAY_UP["setup_commands"])
    assert "RAY_AUTH_MODE=token" in (FOLDER / "slurm.sh").read_text()
