"""Meshes, along which the groups of a step are: in this process, and described for compiling alone."""
