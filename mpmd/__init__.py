"""Pipeline-parallel JAX: one ordinary train step, cut into stages that groups of devices run.

The public names are in ``__init__.pyi``. Each is imported when it is first used, so that schedules can be
written, checked, simulated and drawn without JAX.
"""

from typing import Any

try:
    import lazy_loader
except ModuleNotFoundError:  # a machine with JAX and numpy alone, which is enough for mpmd.replay
    __all__ = ["replay"]
else:
    _import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

    def __getattr__(name: str) -> Any:
        if name == "StepDroppedError":
            raise AttributeError(
                "mpmd.StepDroppedError is gone: Ctrl-C no longer drops queued steps, so no result raises it; "
                "delete the except clauses that name it"
            )
        return _import_name(name)
