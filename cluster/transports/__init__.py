"""How groups in different processes send arrays to one another.

A message and its arrays enter at ``Router.send`` on one group and leave at ``Router.recv`` on another.
``router`` is the place to start: it implements ``mpmd.runtime.transport.Transport`` by one ``PeerTransport``
for each peer. ``choice`` decides which; ``shared_memory``, ``device`` and ``object_store`` are the three
there are. All that arrives for a group, by whichever transport, goes to its one ``inbox``.
"""
