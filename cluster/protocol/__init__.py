"""The language between the driver and the processes of groups: records that both sides read and write.

To read in order: ``endpoint`` (the processes of all groups), ``process_info`` and ``versions`` (the report of
a process on itself), ``shipment`` (programs as they travel), ``packing`` (host arrays as they are pickled),
``digests`` (of bytes that travel or are kept).
"""
