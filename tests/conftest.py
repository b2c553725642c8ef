"""All tests run on eight fake CPU devices, and compile quickly rather than well.

The variables must be there before JAX is first imported.
"""

import gc
import os
import signal
from importlib.metadata import version

import pytest
from hypothesis import settings
from packaging.version import Version

from tests.support import effort
from tests.support.compiled import CompiledCode

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


settings.load_profile(effort.GATE)  # --hypothesis-profile=nightly is for `make test-slow`


@pytest.fixture(scope="session")
def compiled_code():
    """What a test has compiled, those behind it load, as equal layers and optimizers are in many programs."""
    import jax

    with CompiledCode() as code:
        jax.config.update("jax_compilation_cache_dir", str(code.directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        yield code


@pytest.fixture(scope="module", autouse=True)
def compiled_once(compiled_code):
    """Shares what the tests of a module compile with the other processes, and with later runs."""
    compiled_code.fetch()
    yield
    compiled_code.publish()


@pytest.fixture(scope="module", autouse=True)
def collected_once():
    """Leaves what the modules before have made out of collections: JAX's caches keep most of it for ever."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def mesh():
    """Two groups of one of this process's devices each."""
    from tests.support.parity import mesh_of  # which imports JAX

    with mesh_of(2) as mesh:
        yield mesh


@pytest.fixture
def command(capsys):
    """Runs ``mpmd`` with these words and further arguments; returns its exit code, stdout and stderr."""
    from mpmd.cli.main import main

    def run(words, *arguments):
        try:
            code = main([*words.split(), *map(str, arguments)])
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


@pytest.hookimpl(tryfirst=True)  # before cases are selected by their markers
def pytest_collection_modifyitems(config, items):
    """Leaves to ``make test-slow`` the cases of a test that its marker ``usual`` does not name.

    A property that is tried with very many examples may take any time.
    """
    unnamed = {}
    is_nightly = config.getoption("--hypothesis-profile") == effort.NIGHTLY
    for item in items:
        if marker := item.get_closest_marker("usual"):
            test = item.parent.nodeid, item.originalname
            unnamed.setdefault(test, set(marker.args)).discard(item.callspec.id)
            if item.callspec.id not in marker.args:
                item.add_marker(pytest.mark.slow)
        if is_nightly and item.get_closest_marker("hypothesis"):
            item.add_marker(pytest.mark.timeout(0))
    is_whole = not any("::" in argument for argument in config.args)
    if is_whole and any(unnamed.values()):
        raise pytest.UsageError(f"markers usual(...) name cases that do not exist: {unnamed}")


def pytest_collection_finish():
    """Collects garbage less often: traces make many objects, most of which live as long as JAX's caches."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
