"""Messages between processes in host memory, across nodes: by a TCP connection for each two processes.

A connection carries frames, whose bytes arrive as they were sent or not at all. A message is a header and its
values, each of which begins at an aligned place, so the receiver reads all values into one buffer, where
executables read them without a copy. Large values are written from the sender's own memory. The dtypes and
shapes of a message's values are announced once, and later messages of the same kind refer to the announcement
by number. Once for each step, the receiver says how many messages were taken, which limits how far a sender
may be ahead.

Both ends have a thread that reads, even while their programs wait, and one that writes the bytes that the
network does not take at once. So no program waits for the network when it sends, and no order of messages is
a deadlock.

Connections are authenticated before anything is interpreted, and encrypted between nodes.
Start reading at ``transport``; ``peer`` is the connection to one other process.
"""
