"""Runs plans: the executor, the transports' protocol, and the runtime inside one process."""
