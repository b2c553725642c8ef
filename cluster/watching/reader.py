"""The viewer's side of ``mpmd top``: a program that writes a line of JSON for each look at the runs.

    python -m cluster.watching.reader [--address HOST:PORT] [--interval SECONDS] [--once]

It connects with Ray's store alone: it is no job of the cluster, and reaches no process of a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import uuid
from collections.abc import Mapping

from cluster.ray_compat import KeyValueStore, StoreError, clusters_here, use_token
from cluster.start.ray_connection import check_reachable
from cluster.watching.keys import POLL_SECONDS, RUN, VIEW
from mpmd.watching.run_record import RunRecord

ANSWER_SECONDS = 4 * POLL_SECONDS
"""The seconds that a driver has to answer: it looks every ``POLL_SECONDS``, and may ask its groups for 2."""

_LOOK_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Look:
    """The runs of a cluster as they are now.

    Attributes:
      records: by the names of the runs.
      silent: the runs whose drivers have not answered; their records are old.
      unreadable: why records could not be read.
    """

    records: Mapping[str, RunRecord]
    silent: frozenset[str]
    unreadable: tuple[str, ...]

    def as_json(self, address: str) -> dict:
        return {
            "address": address,
            "runs": [
                {"answered": run not in self.silent, "record": json.loads(record.to_json())}
                for run, record in sorted(self.records.items(), key=lambda item: item[1].launched)
            ],
            "unreadable": list(self.unreadable),
        }


def look(store: KeyValueStore, seconds: float = ANSWER_SECONDS) -> Look:
    """Asks the drivers of a cluster's runs for their descriptions, and waits for these for some seconds."""
    before, unreadable = _records(store, [name.removeprefix(RUN) for name in store.names(RUN)])
    ended = store.ended_jobs()
    records = {run: record for run, record in before.items() if record.job not in ended}
    for run in records:
        store.put(VIEW + run, uuid.uuid4().bytes)
    waiting, until = frozenset(records), time.monotonic() + seconds
    while waiting and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        now, _ = _records(store, waiting)
        records = {
            run: now.get(run, record) for run, record in records.items() if run in now or run not in waiting
        }
        waiting = frozenset(
            run for run in waiting & now.keys() if now[run].published == before[run].published
        )
    return Look(records, waiting, tuple(unreadable))


def _records(store: KeyValueStore, runs) -> tuple[dict[str, RunRecord], list[str]]:
    """The records of runs that there still are, and why others cannot be read."""
    records, unreadable = {}, []
    for run in runs:
        if (text := store.get(RUN + run)) is not None:
            try:
                records[run] = RunRecord.from_json(text)
            except ValueError as error:
                unreadable.append(str(error))
    return records, unreadable


def look_at(stores: Mapping[str, KeyValueStore]) -> dict:
    """The runs of all clusters, as a line of JSON says them."""
    return {"clusters": [look(store).as_json(address) for address, store in stores.items()]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address")
    parser.add_argument("--interval", type=float, default=2.0)
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    use_token()
    try:
        addresses = clusters_here(options.address)
        for address in addresses:
            check_reachable(address)
        stores = {address: KeyValueStore.at(address) for address in addresses}
        if options.once:
            look_at(stores)  # from now on the drivers have the memory measured
            print(json.dumps(look_at(stores)))
            return 0
        while True:
            begun = time.monotonic()
            print(json.dumps(look_at(stores)), flush=True)
            time.sleep(max(0.0, begun + options.interval - time.monotonic()))
    except (ValueError, OSError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
