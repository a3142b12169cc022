"""Two devices that refuse each other's tensors, the pretend one and the CPU: all that a stage works on lies on its own."""

import copy

import pytest
import torch

from gpubound.decode import weight_view
from gpubound.decode.generate import FastDecoder
from gpubound.decode.placement.plan import LayerStage, move_layers
from gpubound.decode.runner import BatchState, RunnerConfig, Stepper
from gpubound.decode.transformer import FusedRunner
from gpubound.models.deepseek_v4.decode.body import CompressedBody
from gpubound.models.registry import reader_of, runner_of

from ...models.deepseek_v4.decode import cases as compressed
from .. import cases

CPU = torch.device("cpu")


@pytest.fixture
def sim(sim, monkeypatch) -> torch.device:
    monkeypatch.setattr("gpubound.models.deepseek_v4.decode.body.check_reader", lambda reader, max_length: None)
    return sim


def decoder(model, devices: list[torch.device], rows: int = 3, **options) -> FastDecoder:
    """The last layer on the second device."""
    count = len(model.model.layers)
    stages = [LayerStage(devices[0], range(count - 1)), LayerStage(devices[1], range(count - 1, count))]
    move_layers(model, model.model.layers, stages)
    build, reader = RunnerConfig(rows, cases.ROOM), reader_of(model)
    if runner_of(model):
        body = CompressedBody(reader, build, stages)
    else:
        body = FusedRunner(weight_view.bind(model, cases.ROOM, spread=True), build, stages)
    return FastDecoder(model, Stepper(body, BatchState(rows, body.vocab, 32, body.device)), (2, 1), None, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "own", "DeepseekV4"])
def test_each_stage_works_on_its_own_device(kind, sim):
    """Prompts, steps of lanes, the certificate, the model's own forward, the judge."""
    model = compressed.build() if kind == "DeepseekV4" else cases.build(kind)
    if kind == "DeepseekV4":  # else by an operation that the pretend device does not have
        model.config._experts_implementation = "eager"
    alone = copy.deepcopy(model)
    fast = decoder(model, [sim, CPU], verify=kind != "DeepseekV4")  # whose body has tried itself
    assert {p.device for p in model.parameters()} == {sim, CPU} and model.lm_head.weight.device == sim
    given = cases.prompts(7, 2, 15)
    cases.assert_greedy(fast, given, 3, alone)
    assert len(fast.score(given[0])[0]) == 6 and fast.body.locate(torch.tensor(given[0], device=sim))


def test_a_model_that_lies_on_two_devices_is_put_where_it_belongs(sim):
    """Also one of whose blocks a part was moved, as by a `.to` that ran out of memory."""
    model = cases.build("Llama")
    alone = copy.deepcopy(model)
    for part in (model.model.embed_tokens, model.model.layers[0].mlp, model.model.layers[1]):
        part.to(sim)
    fast = decoder(model, [sim, CPU], verify=False)
    first, last = ({p.device for p in block.parameters()} for block in model.model.layers)
    assert first == {sim} and last == {CPU} and model.lm_head.weight.device == model.model.norm.weight.device == sim
    row = cases.of_decoder(fast, 3)
    assert row == cases.likeliest(alone, cases.PROMPT, row)


@pytest.mark.slow
def test_a_launch_of_lanes_waits_for_nothing(sim):
    """One pretend device for both stages, for what goes to the CPU is waited for."""
    fast = decoder(cases.build("Llama"), [sim, sim], verify=False)
    fast.generate(cases.prompts(2, 3), max_new_tokens=1, temperature=1.0, repetition_penalty=1.1)
    cases.assert_never_waits(fast.graphs.launch, 3)
