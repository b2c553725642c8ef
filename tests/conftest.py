"""All tests run on eight fake CPU devices, and compile quickly rather than well.

The flags must be there before JAX is first imported.
"""

import os

import pytest

FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items):
    """With ``-n``, tests on Ray stay in one process, with the one cluster; others stay with their file."""
    for item in items:
        group = "ray" if item.path.parent.name == "ray" else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
