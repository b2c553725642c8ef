"""Train steps that users write, by theme: what plain JAX computes, a pipeline has to compute."""

from tests.support.programs import (
    architectures,
    carried,
    composition,
    control_flow,
    derivatives,
    experts,
<<<<<<< HEAD
    gradients,
=======
    found_layers,
>>>>>>> layers
    libraries,
    objectives,
    optimizers,
    outputs,
    precision,
    randomness,
    scanned_layers,
    scanned_libraries,
    several_models,
    sharing,
    stacked_arrays,
    stages,
    submeshes,
    training_codes,
)
from tests.support.programs.table import entries_of

THEMES = (
    stages,
    sharing,
    optimizers,
    outputs,
    randomness,
    control_flow,
    derivatives,
    architectures,
    carried,
    objectives,
    composition,
    libraries,
    precision,
    submeshes,
    experts,
    training_codes,
    several_models,
    scanned_layers,
    stacked_arrays,
    scanned_libraries,
<<<<<<< HEAD
    gradients,
=======
    found_layers,
>>>>>>> layers
)
PROGRAMS = [entry for theme in THEMES for entry in entries_of(theme)]
