"""Messages between processes in host memory, across nodes: by a TCP connection for each two processes.

A connection carries frames, whose bytes arrive as they were sent or not at all. A message is a header and its
values, each of which begins at an aligned place, so the receiver reads all values into one buffer, where
executables read them without a copy. Large values are written from the sender's own memory. The header also
has the dtypes and shapes of the values. Once for each step in which messages come, the receiver says that it
has begun the step, which limits how far a sender may be ahead.

Both ends have a thread that reads, even while their programs wait, and one that writes the bytes that the
network does not take at once. So no program waits for the network when it sends, and no order of messages is
a deadlock.

Connections are authenticated before anything is interpreted, and encrypted between nodes.
Start reading at ``transport``; ``peer`` is the connection to one other process.
"""
