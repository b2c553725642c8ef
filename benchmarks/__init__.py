"""The cost of steps, measured beside other ways to run the same training: ``python -m benchmarks NAME ...``.

``__main__.py`` has the registry and the options, ``frame.py`` what benchmarks share, ``report.py`` the tables
and the JSON, ``host.py`` the processes. Each other module with a function ``run`` is a benchmark.
"""
