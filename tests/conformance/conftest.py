"""What tests of many tiny programs share."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compiles():
    """The programs are many and tiny: compiling them takes longer than running them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
