"""Random pipeline programs: what they can be, how they are drawn, and the train steps that they describe."""

from tests.support.random_programs.description import Layer, Output, Program, Side, Skip, Stage
from tests.support.random_programs.draw import programs, programs_of_two_loops
from tests.support.random_programs.outside import arguments_of, axes_of, options_of, step_of, submeshes_of

__all__ = [
    "Layer",
    "Output",
    "Program",
    "Side",
    "Skip",
    "Stage",
    "arguments_of",
    "axes_of",
    "options_of",
    "programs",
    "programs_of_two_loops",
    "step_of",
    "submeshes_of",
]
