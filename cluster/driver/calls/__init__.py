"""The driver's calls on actors, and what follows from replies, failures and silence.

To read in order: ``actor_calls`` (calls, and the thread that settles them), ``pending_calls`` (what is
awaited, and what a failure ends), ``monitor`` (which groups are dead, and which step is late, by ``health``,
of connections and pings, and ``watchdog``, of what takes too long), ``ray_errors`` and ``post_mortem`` (why a
process has died), ``joined`` (one future for a group of several processes).
"""
