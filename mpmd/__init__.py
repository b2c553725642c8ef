"""Pipeline-parallel JAX: one ordinary train step, cut into stages that groups of devices run.

The public names are in ``__init__.pyi``. Each is imported when it is first used, so that schedules can be
written, checked, simulated and drawn without JAX.
"""

try:
    import lazy_loader
except ModuleNotFoundError:  # a machine with JAX and numpy alone, which is enough for mpmd.replay
    __all__ = ["replay"]
else:
    __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
