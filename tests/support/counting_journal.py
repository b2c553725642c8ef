"""A journal that numbers the steps which tests add to it, as a runtime numbers the steps of a mesh."""

import dataclasses
import itertools

from cluster.recovery.journal import Journal


class CountingJournal(Journal):
    def __init__(self):
        super().__init__()
        self._numbers = itertools.count(1)

    def add_step(self, requests):
        number = next(self._numbers)
        return super().add_step({i: dataclasses.replace(each, step=number) for i, each in requests.items()})
