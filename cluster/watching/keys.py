"""The keys under which drivers and viewers find each other in Ray's store."""

RUN, VIEW = "run:", "view:"
"""The beginnings of two keys of a run, which end with its name. ``RUN``: its description, by its driver.
``VIEW``: any text, another one whenever a viewer asks for a new description."""

POLL_SECONDS = 1.0
"""The seconds between two looks of a driver whether somebody has asked."""
