"""Messages between devices, across nodes too: by ``jax.experimental.transfer``.

The sender offers a message's arrays to its transfer server, and announces them to the receiver over a
connection between the two processes. A thread of the receiver pulls them at once, while the program may still
compute; ``recv`` waits until they have arrived. Small values in host memory are sent with the announcement.

Two properties of the transfer server decide the rest. An array that is offered stays alive until it is
pulled, so all that is announced is pulled, also when its step was aborted. And a pull from a peer that is
gone, or of arrays that were never offered, waits forever; so nothing is pulled that was not announced, and
when a peer dies, the end of its connection ends the pulls from it.

The server neither encrypts nor authenticates: only offer numbers that cannot be guessed protect the arrays,
and whoever sends it a few bytes ends the process. So it is used only if it is asked for by name, in a network
that is trusted. The connections between the processes are as everywhere: authenticated, and encrypted.

The connection is ``cluster.transports.network.peer``'s; ``transfers`` is its payload here.
"""
