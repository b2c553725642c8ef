"""Meshes of groups: of this process's devices in ``mesh.py``, only described in ``abstract_mesh.py``."""
