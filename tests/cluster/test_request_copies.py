"""The way of a step request from ``submit`` to ``GroupWorker.answer``: it is copied twice at most."""

import collections
import pickle
from unittest.mock import MagicMock

import pytest

import mpmd
from cluster.driver.runtime import RayRuntime
from cluster.process.actor import GroupActor
from mpmd.runtime.requests import StepRequest
from mpmd.runtime.worker import GroupWorker
from tests.support.models import batch, init, make_step, mse, weights
from tests.support.parity import mesh_of
from tests.support.pretended_groups import Calls, Driven, Processes, Whole, WithoutSnapshots
from tests.support.processes import endpoints


@pytest.fixture
def made(monkeypatch):
    """The number of step requests that were made for each group, by the handles of its results."""
    made, init = collections.Counter(), StepRequest.__init__

    def counted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made[self.outputs] += 1

    monkeypatch.setattr(StepRequest, "__init__", counted)
    return made


def test_in_one_process_a_step_request_is_copied_once(made, monkeypatch):
    answered, answer = [], GroupWorker.answer

    def noted(self, request):
        answered.append(request)
        return answer(self, request)

    monkeypatch.setattr(GroupWorker, "answer", noted)
    with mesh_of(2) as mesh:
        _, (loss, _) = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh)(init(weights(2)), *batch())
        float(loss)
    steps = [request.outputs for request in answered if isinstance(request, StepRequest)]
    assert len(steps) == 2 and [made[outputs] for outputs in steps] == [2, 2]


class Actors(Calls):
    """In place of the driver's calls: requests arrive at actors, which hand them to their workers."""

    def ask_step(self, requests):
        for request in requests.values():
            actor = GroupActor.__new__(GroupActor)
            vars(actor).update(_last_run=0, _router=MagicMock(), _worker=MagicMock())
            actor.answer(pickle.loads(pickle.dumps(request)))
            actor._worker.answer.assert_called_once()
        return super().ask_step(requests)


def submit(runtime):
    return runtime.ask({i: StepRequest(0, 1, (), (i,)) for i in range(2)})


def test_on_its_way_to_an_actor_a_step_request_is_copied_once(made):
    runtime = RayRuntime(endpoints([1, 1]), "cpu", {})
    runtime._arguments[0], runtime._calls = Whole(), Actors(endpoints([1, 1]))
    submit(runtime)
    assert made == {(0,): 2, (1,): 2}


class ActorProcesses(Processes):
    def calls(self, connections, on_death):
        super().calls(connections, on_death)
        self.attempts[-1] = Actors(self.endpoints)
        return self.attempts[-1]


@pytest.mark.parametrize(("verify_every", "copies"), [(None, 1), (100, 2)])
def test_only_groups_whose_runs_are_compared_get_a_second_copy(made, verify_every, copies):
    driven = Driven(ActorProcesses(), WithoutSnapshots(every=100, verify_every=verify_every))
    submit(driven)
    assert made == {(0,): 1 + copies, (1,): 1 + copies}
    driven.die(1)
    assert made == {(0,): 1 + 2 * copies, (1,): 1 + 2 * copies}, "a repetition begins from the same request"
