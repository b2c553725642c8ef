"""All tests run on eight fake CPU devices; the flag must be there before JAX is first imported."""

import os

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
