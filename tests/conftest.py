"""All tests run on eight fake CPU devices, and compile quickly rather than well.

The flags must be there before JAX is first imported.
"""

import os
import signal

import pytest

FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and tests that interrupt a wait would wait until it times out.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """What a test has compiled, those behind it load, as equal layers and optimizers are in many programs.

    Entries are for this run and process alone: nothing is left of other code, and nobody else writes to them.
    """
    import jax

    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
