"""TCP connections between the processes of a mesh, and with the driver: between those who know its secret.

To read in order: ``connection`` (both ends of one), ``credentials`` (of a launch), ``greeting`` (the proof
that a peer has them), ``sockets`` (who listens and who connects), ``frames`` (what is sent), ``rpc``
(requests and replies).
"""
