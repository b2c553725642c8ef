"""Messages between groups of one node: values in memory that both processes map, headers through a pipe.

Each direction between two processes has

- slots: anonymous memory, each for one message at a time, allocated when no slot is free (``slots``);
- the pipe of the receiver's inbox, to which all its senders write a header of fixed size for each message;
- a Unix socket, by which slots and the layouts of messages are announced before they are used, and whose end
  shows that a process is gone (``announcements``);
- a counter in shared memory of the messages that were received.

Sockets have abstract names and memory has none, so nothing remains in a file system after the processes. A
value is copied once, from the sender's buffer to the slot, and the receiver's executables read it there.
Start reading at ``transport``; ``sender`` and ``receiver`` are the two ends of one direction.
"""
