"""Connections between the processes of a mesh, and with the driver: between those who know its secret.

To read in order: ``connection`` (both ends of one by TCP), ``records`` (how bytes travel there),
``credentials`` (of a launch), ``greeting`` (the proof that a peer has them), ``admission`` (who is let in),
``sockets`` (listening and connecting by TCP) and ``local`` (the same on one machine), ``frames`` (what is
sent), ``rpc`` (requests and replies).
"""
