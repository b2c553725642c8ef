"""All tests run on eight fake CPU devices, and compile quickly rather than well.

The variables must be there before JAX is first imported.
"""

import collections
import gc
import os
import signal
from importlib.metadata import version

import pytest
from packaging.version import Version

FLAGS = [
    "--xla_backend_optimization_level=0",
    # Tests run in as many processes as there are cores: dividing a small module among threads is overhead.
    "--xla_cpu_parallel_codegen_split_count=1",
]
if Version(version("jaxlib")) < Version("0.11.1"):  # later releases abort on the flag
    # The older emitters compile in less than half the time; numbers differ by rounding at most.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")

os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")  # a failing test shows the frames of this project

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


@pytest.hookimpl(tryfirst=True)  # before cases are selected by their markers
def pytest_collection_modifyitems(items):
    """Leaves cases of a test that is marked ``one_in(n)`` to ``make test-slow``: all but one in n.

    A case that is collected by itself is the first one, which is not slow.
    """
    counts = collections.Counter()
    for item in items:
        if (marker := item.get_closest_marker("one_in")) and not item.get_closest_marker("slow"):
            test = item.parent.nodeid, item.originalname
            block, offset = divmod(counts[test], marker.args[0])
            if offset != block % marker.args[0]:  # so that each value of each parameter has its turn
                item.add_marker(pytest.mark.slow)
            counts[test] += 1


def pytest_collection_finish():
    """Collects garbage less often: traces make many objects, most of which live as long as JAX's caches."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
