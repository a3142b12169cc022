"""What a CPU cannot show: graphs of the step, no wait in a request, a long text."""

import pytest
import torch

import gpubound as gb
from gpubound.decode.runner import SamplingVariant, Stepper
from gpubound.watch import watch

from .cases import ROOM, body_of, build, own_logits, stand, text
from .test_body import edges

pytestmark = pytest.mark.gpu
EXACT = {"rtol": 0, "atol": 2e-5}
GPU = "cuda:0"


def of_gpu(dtype=torch.float32, **options):
    return build(dtype, GPU, **options)


def recorded(body, token: torch.Tensor, position: torch.Tensor) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body.step(token, position)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body.step(token, position)
    return graph


@torch.no_grad()
def test_a_graph_recorded_at_one_length_serves_any_other():
    """Beside eager steps and the model's own logits; what no text wrote is NaN."""
    model, ids = of_gpu(), text(300).to(GPU)
    body, want = body_of(model), own_logits(model, ids)
    token, position = torch.zeros(2, 3, dtype=torch.int32, device=GPU)
    graph = recorded(body, token, position)
    lengths = [*edges(), 0, 100, 299]
    for place in zip(*[iter(lengths)] * 3, strict=True):
        found = []
        for replay in (graph.replay, lambda: body.step(token, position)):
            body.poison()
            stand(body, [ids[:n].cpu() for n in place])
            token.copy_(ids[list(place)])
            position.copy_(torch.tensor(place))
            replay()
            found.append(body.logits[:3].clone())
        assert torch.equal(found[0].argmax(-1), found[1].argmax(-1))
        torch.testing.assert_close(found[0], found[1], **EXACT)
        torch.testing.assert_close(found[0], want[list(place)], **EXACT)


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_a_request_waits_for_nothing_on_the_device(rows):
    fast = gb.decoder(of_gpu(torch.bfloat16), rows, ROOM)
    prompts = [text(n, seed=n).tolist() for n in range(3, 3 + rows)]
    for _ in range(2):
        fast.generate(prompts, max_new_tokens=64)
    torch.cuda.synchronize()
    with watch(gputrace=True) as ledger:
        found = fast.generate(prompts, max_new_tokens=64)
    assert ledger.totals["syncs"] == 0, str(ledger)
    assert found.count == 64 * rows


@torch.no_grad()
def test_launches_of_k_steps_bring_the_tokens_of_single_steps():
    fast = gb.decoder(of_gpu(torch.bfloat16), 2, ROOM)
    prompts = [text(9).tolist(), text(30, seed=3).tolist()]
    found = fast.generate(prompts, max_new_tokens=200).tokens
    plain = gb.decoder(fast.model, 2, ROOM, k=1)
    plain.graphs.launch = lambda rows, steps, way: Stepper(plain.body, plain.slots).run(rows, steps, way)  # type: ignore
    assert plain.generate(prompts, max_new_tokens=200).tokens == found
    assert SamplingVariant() in {way for _, _, way in fast.graphs._launches}


@torch.no_grad()
def test_2000_tokens():
    """Each is the model's own likeliest after all before it, but where two lie within rounding."""
    model = of_gpu(max_position_embeddings=2304)
    fast = gb.decoder(model, 1, 2304)
    prompt = text(11).tolist()
    tokens = fast.generate(prompt, max_new_tokens=2000).tokens[0]
    own = own_logits(model, torch.tensor([*prompt, *tokens[:-1]], device=GPU))[len(prompt) - 1 :]
    chosen = own.gather(-1, torch.tensor(tokens, device=GPU)[:, None])[:, 0]
    assert len(tokens) == 2000 and (own.amax(-1) - chosen).max() < 1e-4
