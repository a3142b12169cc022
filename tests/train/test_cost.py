"""What is timed beside a LoRA step: the frozen model's forward and dX, all of it and nothing else; nothing is left changed."""

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound import measure
from gpubound.cli import session
from gpubound.distributed import ALONE
from gpubound.errors import MeasureError
from gpubound.lora.layers import active_in, adapted_layers
from gpubound.monitor import RunTape
from gpubound.train.adapters import trained_state
from gpubound.train.records import Price, frozen_alone
from tests.messages import message

from .objectives.test_causal_lm import batch
from .runs import recipe, train
from .test_step_adapters import WAYS, FrozenProducts

pytestmark = [pytest.mark.usefixtures("one_thread")]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["our decoder", "placed"])
def test_the_frozen_step_is_forward_and_dx(way):
    """Every frozen matrix is multiplied by in backward, and no product makes a weight's gradient or an adapter's."""
    model = WAYS[way]("all-linear").train()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with frozen_alone(model):
        seen = FrozenProducts(model)
        step = gb.TrainStep(model, "causal_lm", "adamw", precision="fp32", graph="off")
        total, _ = step._graphs.step.loss(model, batch(0), scale=torch.ones(()))
        with seen:
            total.backward()
        step.close()
    inside = {name for name in seen.matrices if "layers." in name and ".lora_" not in name}
    assert seen.below_head() == inside and len(inside) == 3 * 7 and seen.others == 0
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    assert all(active_in(layer) for _, layer in adapted_layers(model))


@pytest.mark.slow
def test_a_finished_run_tells_its_price_and_is_left_as_it_was(corpus, base, tmp_path):
    run, _ = train(recipe(corpus, tmp_path, model=str(base), lora={"rank": 4, "dropout": 0.1}, accumulate=2))
    before = {name: t.clone() for name, t in run.model.state_dict().items()}
    kept, at = trained_state(run.model).keys(), run.feed.state_dict()
    price = run.price()
    assert price.step.median_s > 0 and price.frozen.median_s > 0
    assert all(torch.equal(t, before[name]) for name, t in run.model.state_dict().items())
    assert trained_state(run.model).keys() == kept and run.feed.state_dict() == at
    run.export(tmp_path / "adapter")


def test_in_words():
    step, frozen = (measure.Timing.of([seconds] * 3, "device events") for seconds in (12e-3, 8e-3))
    assert str(Price(step, frozen)) == message("train/price:in_words")


def test_a_model_without_such_a_norm():
    with pytest.raises(MeasureError) as error, frozen_alone(nn.Sequential(nn.Linear(2, 2))):
        pass
    assert str(error.value) == message("train/price:a_model_without_such_a_n")


def test_it_is_told_at_the_end_of_a_run(tmp_path):
    told = Price(*(measure.Timing.of([seconds], "device events") for seconds in (3e-3, 2e-3)))
    run, tape = type("Run", (), {"price": lambda self: told, "ranks": ALONE})(), RunTape.create(tmp_path)
    outcome = session.with_adapter_cost(run, session.Outcome(tape, "8 steps.", failed=False))
    assert outcome.verdict == f"8 steps. {told}." and outcome.tape.about["price"] == pytest.approx(1.5)


@pytest.mark.parametrize("kind", [MeasureError, ValueError, torch.OutOfMemoryError])
def test_what_cannot_be_measured_is_left_out(kind, tmp_path, said):
    """Whatever it raises: the run has finished, and its export follows."""

    def price(self):
        raise kind("no norm.\nNone at all.")

    before = session.Outcome(RunTape.create(tmp_path), "8 steps.", failed=False)
    assert session.with_adapter_cost(type("Run", (), {"price": price, "ranks": ALONE})(), before) is before
    assert message("train/price:what_cannot_be_measured").within(said())


@pytest.mark.gpu
def test_a_run_on_a_gpu_tells_it(corpus, base, tmp_path, capsys):
    from gpubound.train.prepare import prepare

    options = {"model": str(base), "lora": {"rank": 4, "dropout": 0.1}, "device": "cuda", "steps": 8}
    run = prepare(recipe(corpus, tmp_path, **options), progress=False)
    outcome = session.train(run, "run")
    assert message("train/price:a_run_on_a_gpu_tells_it").within(capsys.readouterr().err)
    assert outcome.tape.about["price"] > 0
