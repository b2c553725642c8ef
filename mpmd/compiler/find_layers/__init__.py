"""Finds the layers of a function, and marks the ends of stages between them.

A function enters; a function with marks leaves. Start reading in ``auto_marks.py``; ``find_layers.py`` groups
equations.
"""
