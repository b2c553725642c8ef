"""What the documents tell to install."""

import json
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp

from tests.support.parity import assert_close

ROOT = Path(__file__).parents[1]


def test_a_job_installs_what_the_project_needs():
    environment = re.search(r"--runtime-env-json '(.*)'", (ROOT / "docs" / "clusters.md").read_text())
    listed = {re.split("[=<>]", package)[0] for package in json.loads(environment[1])["pip"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[\[=<>]", dependency)[0] for dependency in project["dependencies"]}
    # Ray is there already, and jax brings the other two.
    assert needed - {"ray", "jaxlib", "scipy"} <= listed


def test_the_train_step_computes_what_plain_jax_computes():
    step, in_process, on_ray, use = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert "cluster.launch" in on_ray
    keys = jax.random.split(jax.random.key(0), 6)
    params = [{"w": jax.random.normal(key, (4, 4)) / 2, "b": jnp.zeros(4)} for key in keys]
    x = jax.random.normal(jax.random.key(1), (16, 4))
    namespace = {"params": params, "x": x, "y": jnp.sin(x)}
    exec(step, namespace)
    expected = jax.jit(namespace["train_step"])(params, x, jnp.sin(x))
    exec(in_process + use, namespace)
    try:
        assert_close((namespace["params"], namespace["loss"]), expected)
    finally:
        namespace["mesh"].close()
