"""Arrays that live on groups: whole ones in ``array.py``, stacks of layers in ``stacked_array.py``."""
