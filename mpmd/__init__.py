"""Pipeline-parallel JAX: one ordinary train step, cut into stages that groups of devices run.

The public names are in ``__init__.pyi``. Each is imported when it is first used, so that schedules can be
written, checked, simulated and drawn without JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
