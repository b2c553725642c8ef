"""The start of groups: from the shape of a mesh to connected actors.

To read in order: ``shapes`` (of groups and processes, and their faults), ``ray_connection`` (of the driver),
``processes`` (of all groups), ``resources`` (reserves them), ``environment`` (of each process), ``actors``
(starts them), ``connect`` (has them take their devices, and connects them).
"""
