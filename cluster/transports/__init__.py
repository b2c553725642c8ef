"""Transports, by which groups in different processes send arrays to one another.

A message and its arrays enter at ``Router.send`` in one process and leave at ``Router.recv`` in another.
``router`` is the place to start: it implements ``mpmd.runtime.transport.Transport`` by one ``PeerTransport``
for each peer. ``choice`` decides which; ``shared_memory``, ``network``, ``device`` and ``object_store`` are
the four there are. All that arrives for a process, by whichever transport, goes to its one ``inbox``.
"""
