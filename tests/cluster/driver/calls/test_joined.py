"""One future of several."""

import gc
import weakref
from concurrent.futures import Future

import numpy as np
import pytest

from cluster.driver.calls.joined import joined
from mpmd.errors import StepAborted


def test_the_first_error_of_its_own_is_that_of_the_whole():
    futures = [Future() for _ in range(4)]
    whole = joined(futures, list)
    futures[3].set_exception(StepAborted("because of 2"))
    futures[2].set_exception(ValueError("the first"))
    futures[0].set_exception(ValueError("the second"))
    futures[1].set_result(1)
    with pytest.raises(ValueError, match="the first"):
        whole.result()


def test_an_error_of_the_combination_is_that_of_the_whole():
    future = Future()
    whole = joined([future], lambda results: 1 / results[0])
    future.set_result(0)
    with pytest.raises(ZeroDivisionError):
        whole.result()


def test_nothing_keeps_the_results_alive():
    futures = [Future() for _ in range(2)]
    whole = joined(futures, lambda arrays: arrays[0] + arrays[1])
    gc.disable()
    try:
        arrays = [np.ones(3), np.ones(3)]
        alive = [weakref.ref(array) for array in arrays]
        for future, array in zip(futures, arrays, strict=True):
            future.set_result(array)
        whole.result()
        del futures, future, arrays, array
        assert [array() for array in alive] == [None, None]
    finally:
        gc.enable()
