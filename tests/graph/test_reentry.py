"""What one caller at a time may use, and what cannot be copied."""

import copy
import pickle
import threading

import pytest

from gpubound.graph.guards import NotCopyable, ReentryGuard
from tests.messages import message


def test_one_caller_at_a_time_in_whatever_thread():
    turn, heard = ReentryGuard(KeyError, "busy"), []

    def other():
        try:
            with turn:
                heard.append("inside")
        except KeyError as error:
            heard.append(error.args[0])

    with turn:
        for call in (other, lambda: in_a_thread(other)):
            call()
        assert turn.taken
    in_a_thread(other)
    assert heard == ["busy", "busy", "inside"] and not turn.taken


def test_a_generator_may_end_in_another_thread_than_it_began():
    turn = ReentryGuard(KeyError, "busy")

    def taking():
        with turn:
            yield

    running = taking()
    next(running)
    in_a_thread(running.close)
    assert not turn.taken


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copy_is_made(make):
    class Step(NotCopyable):
        INSTEAD = "copy the model"

    with pytest.raises(TypeError, check=message("single:no_copy_is_made")):
        make(Step())


def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
