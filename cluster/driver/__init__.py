"""The driver's side of the actors: programs, step requests and their replies.

To read in order: ``runtime`` (implements ``mpmd.runtime.protocol.Runtime``), ``exports`` (programs for their
shipment), ``arguments`` (the slices of host arrays that each process is sent), ``calls`` (on the actors, and
what follows from failures), ``status`` (of all processes), ``ray_session`` (calls to Ray after its end).
"""
