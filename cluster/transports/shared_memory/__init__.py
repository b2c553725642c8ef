"""Messages between groups of one node: values in memory that both processes map, headers through a pipe.

Two processes are connected by a Unix socket, once both have proven who they are. By this socket, each process
says where its inbox is, and announces slots before their first use (``announcements``). The end of the
connection shows that a process is gone. Each direction between the two has

- slots: anonymous memory, each for one message at a time, allocated when no slot is free (``slots``);
- the pipe of the receiver's inbox, to which all its senders write a header of fixed size for each message;
- the step of the receiver, in a page of memory that all its senders map.

A header has a digest of itself and a digest of the values and their types (``headers``). A mismatch shows a
change on the way, and ends the connection.

Sockets have abstract names and memory has none, so nothing remains in a file system after the processes. A
value is copied once, from the sender's buffer to the slot, and the receiver's executables read it there.
Start reading at ``transport``; ``sender`` and ``receiver`` are the two ends of one direction.
"""
