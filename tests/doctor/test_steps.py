"""What ends a step: an optimizer, what the user names, or else what repeats: updates by hand, generation, servers."""

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from gpubound.doctor.finding import Verdict
from gpubound.doctor.record import script
from gpubound.doctor.record.script import Steps
from gpubound.doctor.report.words import notes
from tests.messages import message

from .verdicts import judged, looped


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


def named():
    return "result"


def test_a_function_or_an_annotation_can_end_a_step():
    ended = []
    with Steps(lambda: ended.append(1), f"{__name__}:named"):
        assert globals()["named"]() == "result"
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
    with pytest.raises(ValueError, check=message("doctor/steps:a_marker_that_names_noth")), Steps(lambda: None, marker):
        pass


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(script, "FEWEST", 5)
    monkeypatch.setattr(script, "UPDATES", 5)
    monkeypatch.setattr(script, "PATIENT", 20)


class Counted(Steps):
    def __init__(self):
        self.ends = 0
        super().__init__(self.end)

    def end(self):
        self.ends += 1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(self.inner(x))


def trained(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad


def test_an_update_by_hand_has_a_backward_for_each_step():
    with Counted() as steps:
        trained(Model(), 12)
    assert steps.ends == 7 and steps.name == "a call of backward()"


def test_the_call_of_the_outermost_module_is_a_step_of_a_server():
    model = Model().eval()
    before = dict(nn.modules.module._global_forward_hooks)
    with Counted() as steps:
        model.eval()
        for _ in range(12):
            model(torch.ones(1, 2))
            assert steps.ends == 0 or not nn.modules.module._global_forward_hooks.keys() - before, "slow for every module"
    assert steps.ends == 7 and steps.name == "a call of Model"
    model(torch.ones(1, 2))
    assert steps.ends == 7 and dict(nn.modules.module._global_forward_hooks) == before


def test_a_model_of_transformers_has_an_eval_of_another_class():
    class Pretrained(Model):
        def eval(self):
            return self.train(False)

    with Counted() as steps:
        model = Pretrained().eval()
        for _ in range(12):
            model(torch.ones(1, 2))
    assert steps.ends == 7 and steps.name == "a call of Pretrained"


def test_a_generation_loop_need_not_call_eval():
    """What has no parameters, such as a transform of the loader, is no model."""
    scaled, model = nn.Sequential(nn.ReLU()), Model()
    with Counted() as steps:
        for _ in range(12):
            model(scaled(scaled(torch.ones(1, 2))))
    assert steps.ends == 7 and steps.name == "a call of Model"


def test_a_loop_that_only_replays_a_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    graphs = [object(), object()]
    with Counted() as steps:
        torch.cuda.CUDAGraph.replay(graphs[0])  # the first token's
        for _ in range(12):
            torch.cuda.CUDAGraph.replay(graphs[1])
    assert steps.ends == 8 and steps.name == "a replay of a CUDA graph"


def test_an_optimizer_makes_the_steps_whatever_repeated_before():
    model = Model()
    with Counted() as steps:
        model.eval()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(12):
            model(torch.ones(1, 2))
        trained(model, 12)
        assert steps.ends == 0, "an evaluation before training, and many micro-batches"
        for _ in range(3):
            trained(model, 2)
            optimizer.step()
    assert steps.ends == 3 and steps.name == ""


def test_the_report_says_what_a_step_is():
    verdict = judged(*looped()).as_dict() | {"step": "a call of backward()"}
    assert any("a call of backward()" in note for note in notes(Verdict.from_dict(verdict)))
    assert not any("step is" in note for note in notes(judged(*looped())))
