"""Tools without a notion of a step: tables, trees of values, files, clocks."""
