"""The driver's calls on actors, and the consequences of replies, failures and silence.

To read in order: ``actor_calls`` (calls, and the thread that handles their failures), ``pending_calls``
(calls without a reply, and the calls that a failure ends), ``liveness`` (which groups are dead, and which
step is late), ``post_mortem`` (why a process has died), ``joined`` (one future for a group of several
processes).
"""
