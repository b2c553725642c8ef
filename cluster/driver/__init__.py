"""The driver's side of the actors: programs, step requests and their replies.

To read in order: ``runtime`` (implements ``mpmd.runtime.protocol.Runtime``), ``exports`` (programs for their
shipment), ``arguments`` (the slices of host arrays that the driver sends each process), ``calls`` (calls on
the actors, and the consequences of failures), ``status`` (of all processes), ``ray_session`` (calls to Ray
after its end).
"""
