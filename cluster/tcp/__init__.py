"""Connections between the processes of a mesh, and with the driver, authenticated by a shared secret.

To read in order: ``connection`` (both ends of a TCP connection), ``records`` (how bytes travel there),
``credentials`` (of a launch), ``greeting`` (the proof that a peer has the credentials), ``admission`` (which
peers are accepted), ``sockets`` (listening and connecting by TCP) and ``local`` (the same on one machine),
``frames`` (the messages), ``rpc`` (requests and replies).
"""
