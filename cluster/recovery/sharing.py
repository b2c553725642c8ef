"""Chooses which processes share devices while there is no room for all. Knows no Ray."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from cluster.protocol.process_info import ProcessInfo


def choose_hosts(
    guests: Mapping[int, int], hosts: Mapping[int, ProcessInfo], shares_with: Mapping[int, int]
) -> dict[int, int]:
    """Chooses a host for each process without a reservation: the fitting process with the fewest guests.

    Guests on the host's node count first, then guests of the host itself. Processes are named by their
    numbers.

    Args:
      guests: the processes, and how many devices each needs.
      hosts: the processes that have devices of their own.
      shares_with: the processes that share with hosts already.
    Raises: ``LookupError`` when no host has as many devices as a process needs.
    """
    on_host = collections.Counter(shares_with.values())
    on_node = collections.Counter(hosts[host].node_id for host in shares_with.values() if host in hosts)
    chosen: dict[int, int] = {}
    for guest, num_devices in guests.items():
        fitting = [number for number, info in hosts.items() if len(info.devices) >= num_devices]
        if not fitting:
            raise LookupError(f"none of the processes that are left has {num_devices} devices to share")
        host = min(fitting, key=lambda i: (on_node[hosts[i].node_id], on_host[i], i))
        on_host[host] += 1
        on_node[hosts[host].node_id] += 1
        chosen[guest] = host
    return chosen
