"""What ends a step."""

import pytest
import torch
from torch.profiler import record_function

from gpubound.doctor.record.script import Steps
from tests.messages import message


def parameter():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return p


class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None): ...


def test_the_first_optimizer_of_any_class_counts_and_another_takes_its_place():
    ended = []
    first, second = Own([parameter()]), torch.optim.SGD([parameter()], 0.1)
    with Steps(lambda: ended.append(1)):
        for _ in range(3):
            first.step()
            second.step()
        assert len(ended) == 3
        del first
        second.step()
        assert len(ended) == 4
    second.step()
    assert len(ended) == 4


def trained():
    return "result"


def test_a_function_or_an_annotation_can_end_a_step():
    ended = []
    with Steps(lambda: ended.append(1), f"{__name__}:trained"):
        assert globals()["trained"]() == "result"
        torch.optim.SGD([parameter()], 0.1).step()
    assert len(ended) == 1
    with Steps(lambda: ended.append(1), "batch"):
        for name in ("batch", "other", "batch"):
            with record_function(name):
                pass
        with pytest.raises(KeyError), record_function("batch"):
            raise KeyError
    assert len(ended) == 3
    with record_function("batch"):
        pass
    assert len(ended) == 3


@pytest.mark.parametrize("marker", ["torch:no_such", "no_such_module_xyz:f", ":f"])
def test_a_marker_that_names_nothing_is_a_sentence(marker):
    with (
        pytest.raises(ValueError, check=message("doctor/steps:a_marker_that_names_noth")),
        Steps(lambda: None, marker),
    ):
        pass
