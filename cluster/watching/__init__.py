"""Shows a run to other processes, by Ray's own store of small values.

The driver's ``publisher.py`` describes its mesh there, as JSON (``mpmd/watching/run_record.py``), when a
viewer has asked for it there. ``reader.py`` is the viewer's side, a program that ``mpmd top`` starts. Neither
side connects with the other, and groups are asked nothing but what ``mesh.status()`` asks.
"""
