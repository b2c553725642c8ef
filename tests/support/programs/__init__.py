"""Train steps that users write, by theme: what plain JAX computes, a pipeline has to compute."""

import importlib
import pkgutil

from tests.support.programs.table import entries_of

PROGRAMS = [
    entry
    for theme in pkgutil.iter_modules(__path__)
    for entry in entries_of(importlib.import_module(f"{__name__}.{theme.name}"))
]
