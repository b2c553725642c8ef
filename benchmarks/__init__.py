"""The cost of steps, measured beside other ways to run the same training: ``python -m benchmarks``."""
