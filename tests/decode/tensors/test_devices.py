"""Two devices that refuse each other's tensors, the pretend one and the CPU: all that a slice works on lies on its own."""

import copy

import pytest
import torch

from gpubound.decode import weight_view
from gpubound.decode.generate import FastDecoder
from gpubound.decode.placement import tensor_parallel
from gpubound.decode.placement.plan import LayerStage, move_layers, plan_slices, split_vocabulary
from gpubound.decode.placement.tensor_parallel import SlicedRunner, sliced_runner
from gpubound.decode.runner import BatchState, RunnerConfig, Stepper
from gpubound.models.deepseek_v4.decode import body
from gpubound.models.deepseek_v4.decode.sliced import SlicedStreams
from gpubound.models.registry import reader_of

from ...models.deepseek_v4.decode import cases as compressed
from .. import cases

CPU = torch.device("cpu")


@pytest.fixture
def sim(sim, monkeypatch) -> torch.device:
    """Its memory has no addresses."""
    monkeypatch.setattr(tensor_parallel, "addresses_of", lambda boxes, device: None)
    return sim


def decoder(model, devices: list[torch.device], rows: int = 3, verify: bool = True) -> FastDecoder:
    live = weight_view.bind(model, cases.ROOM)
    body = SlicedRunner(live, RunnerConfig(rows, cases.ROOM), plan_slices(live.shape.vocab, live.layers, devices, 16))
    return FastDecoder(model, Stepper(body, BatchState(rows, body.vocab, 32, body.device)), (2, 1), None, verify)


@pytest.mark.slow
def test_each_slice_works_on_its_own_device(sim):
    """Prompts, steps, the certificate, the judge, scores. The model stays where it is."""
    model = cases.build("Llama", num_hidden_layers=1)
    fast = decoder(model, [sim, CPU])
    assert {p.device for p in model.parameters()} == {CPU} and fast.certificate.logits_error < 1e-5
    given = cases.prompts(7, 2)
    cases.assert_greedy(fast, given, 2)
    assert len(fast.score(given[0])[0]) == 6 and fast.body.locate(torch.tensor(given[0], device=sim))


@pytest.mark.slow
def test_a_model_that_lies_on_several_devices_already(sim, monkeypatch):
    """Another decoder has moved its layers there, in stages."""
    monkeypatch.setattr(weight_view, "_unreadable", lambda model, spread: None if spread else "its weights differ in device")
    monkeypatch.setattr("gpubound.decode.placement.tensor_parallel.free_bytes", lambda devices: [2**40] * len(devices))
    model = cases.build("Llama")
    alone = copy.deepcopy(model)
    move_layers(model, model.model.layers, [LayerStage(sim, range(1)), LayerStage(CPU, range(1, 2))])
    found = sliced_runner(model, RunnerConfig(1, cases.ROOM), True, [sim, CPU])
    fast = FastDecoder(model, Stepper(found, BatchState(1, found.vocab, 32, sim)), (2, 1), None, True)
    assert {p.device for p in model.parameters()} == {sim, CPU}
    row = cases.of_decoder(fast, 3)
    assert row == cases.likeliest(alone, cases.PROMPT, row)


@pytest.mark.slow
def test_a_launch_waits_for_nothing(sim):
    """One pretend device for both slices, for what goes to the CPU is waited for."""
    fast = decoder(cases.build("Llama", num_hidden_layers=1).to(sim), [sim, sim], verify=False)
    fast.generate(cases.prompts(2, 3), max_new_tokens=1, temperature=1.0, repetition_penalty=1.1)
    cases.assert_never_waits(fast.graphs.launch, 3)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_streams_are_sliced_to_their_own_devices(sim, where, monkeypatch):
    """DeepSeek-V4's; the model itself lies on either."""
    monkeypatch.setattr(body, "closed_projection", lambda model, known: None)
    model = compressed.build().to(sim if where == "sim" else CPU)
    model.config._experts_implementation = "eager"  # the grouped one asks a device of no known kind for a histogram of ints
    reader = reader_of(model)
    plans = split_vocabulary(compressed.VOCABULARY, [sim, CPU], 16, None)
    streams = SlicedStreams(reader, RunnerConfig(3, compressed.ROOM), plans)
    fast = FastDecoder(model, Stepper(streams, BatchState(3, streams.vocab, 32, sim)), (2, 1), None, where == "sim")
    given = [compressed.text(length, seed=length).tolist() for length in (7, 2)]
    found = fast.generate(given, max_new_tokens=2).tokens
    for prompt, row in zip(given, found):
        logits = compressed.own_logits(model, torch.tensor([*prompt, *row[:-1]]))
        assert row == logits[len(prompt) - 1 :].argmax(-1).tolist()
    assert len(fast.score(given[0])[0]) == 6 and fast.body.locate(torch.tensor(given[0], device=sim))
