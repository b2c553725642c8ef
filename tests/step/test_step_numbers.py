"""The numbers of steps."""

import mpmd
from tests.support.models import batch, init, make_step, mse, weights


def test_numbers_ascend_in_the_order_of_submission(mesh, monkeypatch):
    """Also when a step is submitted by another thread while a call prepares its own."""
    state = init(weights(2))
    step = mpmd.jit(make_step(mse, mpmd.Std1F1B(2)), mesh)
    step = step.compile(state, *batch())
    runtime, numbers, overtaken = mesh.runtime, [], []
    delivery = runtime.arguments.delivery

    def submit(requests, submit=runtime.ask):
        numbers.append(requests[0].step)
        return submit(requests)

    def overtake(num_groups):
        if not overtaken:  # the call has begun, but does not hold the lock yet
            overtaken.append(True)
            step(state, *batch())
        return delivery(num_groups)

    monkeypatch.setattr(runtime, "ask", submit)
    monkeypatch.setattr(runtime.arguments, "delivery", overtake)
    step(state, *batch())
    assert len(numbers) == 2
    assert numbers == sorted(numbers)
