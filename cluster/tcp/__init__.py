"""Connections between the processes of a mesh, and with the driver, which need the credentials of a launch.

To read in order: ``connection`` (both ends of a TCP connection), ``records`` (how bytes travel on it),
``credentials`` (of a launch), ``handshake`` (the proof that both ends have them), ``listener`` (accepts peers
that have them), ``sockets`` (listening and connecting by TCP) and ``local`` (the same on one machine),
``writer`` (keeps no caller waiting), ``frames`` (the messages), ``rpc`` (requests and replies).
"""
