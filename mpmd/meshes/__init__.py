"""Meshes: the groups that a step runs on, in this process or described alone."""
