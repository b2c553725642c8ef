"""Messages between groups of one node: values in memory that both processes map, headers through a pipe.

Two processes are connected by a Unix socket, once both have proven who they are. By it, each says where its
inbox is, and announces slots and the layouts of messages before they are used (``announcements``). Its end
shows that a process is gone. Each direction between the two has

- slots: anonymous memory, each for one message at a time, allocated when no slot is free (``slots``);
- the pipe of the receiver's inbox, to which all its senders write a header of fixed size for each message;
- a counter in shared memory of the messages that were received.

A header has a digest of itself and one of the values (``headers``). What does not match was changed on the
way, and ends the connection.

Sockets have abstract names and memory has none, so nothing remains in a file system after the processes. A
value is copied once, from the sender's buffer to the slot, and the receiver's executables read it there.
Start reading at ``transport``; ``sender`` and ``receiver`` are the two ends of one direction.
"""
