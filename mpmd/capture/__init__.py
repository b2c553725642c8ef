"""Writes one task of a step to a directory, which ``mpmd.replay`` reads.

``walk.py`` evaluates the equations of a task that has failed, to find the first that makes a NaN, and
``write.py`` makes the files.
"""

from mpmd.capture.write import CaptureWriter

__all__ = ["CaptureWriter"]
