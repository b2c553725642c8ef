"""Which errors say that the processes of a group have lost one another."""

import jax
import pytest

from cluster.world import is_lost


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_errors_of_collectives_are_told_from_others(kind):
    assert is_lost(kind("UNKNOWN: Gloo AllGather failed: Connection reset by peer"))
    assert not is_lost(kind("RESOURCE_EXHAUSTED: Out of memory"))
    assert not is_lost(OSError("Gloo"))
    assert not is_lost(None)
