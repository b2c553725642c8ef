"""All tests run on eight fake CPU devices, and compile quickly rather than well.

The flags must be there before JAX is first imported.
"""

import os

FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
