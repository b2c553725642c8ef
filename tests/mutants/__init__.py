"""Faults that are planted in the project, to see which of them the tests of ``make test`` notice."""
