"""Profiles of Hypothesis: how many examples a property is tried with.

``make test`` runs the profile ``gate``, which draws the same examples each time; ``make test-slow`` draws
others, and more of them, with the profile ``nightly``.
"""

from hypothesis import HealthCheck, settings

GATE, NIGHTLY = "gate", "nightly"
COMMON = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile(GATE, max_examples=20, derandomize=True, **COMMON)
settings.register_profile(NIGHTLY, max_examples=300, print_blob=True, **COMMON)


def costly(test):
    """Tries a property with a tenth of the profile's examples, because each of them compiles a program."""
    return settings(max_examples=settings.default.max_examples // 10)(test)
