"""A journal that numbers the steps which tests add to it, as a runtime numbers the steps of a mesh."""

import dataclasses
import itertools

from cluster.recovery.journal import Journal, Outcome
from mpmd.runtime.requests import CopyOut, Fetch, Read


class CountingJournal(Journal):
    def __init__(self):
        super().__init__()
        self._numbers = itertools.count(1)

    def answer(self, request, mpmd_idx, result=None, error=None, attempt=None):
        """By default in the present attempt."""
        attempt = self.attempt if attempt is None else attempt
        return super().answer(attempt, Outcome(request, mpmd_idx, result, error))

    def add_step(self, requests):
        number = next(self._numbers)
        released = {i: each.released for i, each in requests.items()}
        return self.add({i: dataclasses.replace(each, step=number) for i, each in requests.items()}, released)

    def add_fetch(self, mpmd_idx, handle):
        return self.add({mpmd_idx: Fetch(handle)})

    def add_read(self, mpmd_idx, stored):
        return self.add({mpmd_idx: Read(stored)})

    def add_copy(self, mpmd_idx, copy, handles):
        return self.add({mpmd_idx: CopyOut(copy, tuple(handles))})
