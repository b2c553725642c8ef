"""A family of schedules for each way in which stages are placed on groups."""

PLACEMENTS = ("Std1F1B", "Interleaved1F1B", "ZeroBubbleV", "ListSchedule")
"""One stage per group, round robin, as a V, and an order that is found by a search; names of ``FAMILIES``."""
