"""What the README tells to install."""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_job_installs_what_the_project_needs():
    environment = re.search(r"--runtime-env-json '(.*)'", (ROOT / "README.md").read_text())
    listed = {re.split("[=<>]", package)[0] for package in json.loads(environment[1])["pip"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[\[=<>]", dependency)[0] for dependency in project["dependencies"]}
    # Ray is there already, and jax brings the other two.
    assert needed - {"ray", "jaxlib", "scipy"} <= listed
