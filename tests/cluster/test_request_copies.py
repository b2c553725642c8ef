"""The way of a step request from the driver to ``GroupWorker.answer``: it is copied twice at most."""

import collections
import pickle
from unittest.mock import MagicMock

import pytest

from cluster.process.actor import GroupActor
from mpmd.runtime.requests import StepRequest
from tests.support.pretended_groups import Calls, Driven, Processes, WithoutSnapshots


@pytest.fixture
def made(monkeypatch):
    """The number of step requests that were made for each group, by the handles of its results."""
    made, init = collections.Counter(), StepRequest.__init__

    def counted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made[self.outputs] += 1

    monkeypatch.setattr(StepRequest, "__init__", counted)
    return made


class Actors(Calls):
    """In place of the driver's calls: requests arrive at actors, which hand them to their workers."""

    def ask_step(self, requests):
        for request in requests.values():
            actor = GroupActor.__new__(GroupActor)
            vars(actor).update(_last_run=0, _router=MagicMock(), _worker=MagicMock())
            actor.answer(pickle.loads(pickle.dumps(request)))
            actor._worker.answer.assert_called_once()
        return super().ask_step(requests)


class ActorProcesses(Processes):
    def calls(self, connections, on_death):
        super().calls(connections, on_death)
        self.attempts[-1] = Actors(self.endpoints)
        return self.attempts[-1]


@pytest.mark.parametrize(("verify_every", "copies"), [(None, 1), (100, 2)])
def test_only_groups_whose_runs_are_compared_get_a_second_copy(made, verify_every, copies):
    driven = Driven(ActorProcesses(), WithoutSnapshots(every=100, verify_every=verify_every))
    driven.ask({i: StepRequest(0, 1, (), (i,)) for i in range(2)})
    assert made == {(0,): 1 + copies, (1,): 1 + copies}
    driven.die(1)
    assert made == {(0,): 1 + 2 * copies, (1,): 1 + 2 * copies}, "a repetition begins from the same request"
