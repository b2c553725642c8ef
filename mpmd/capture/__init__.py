"""Writes one task of a step to a directory, which ``mpmd.replay`` reads.

``blocks.py`` writes the equations down, ``exports.py`` exports each that differs from others, and
``write.py`` makes the files.
"""

from mpmd.capture.write import CaptureWriter

__all__ = ["CaptureWriter"]
