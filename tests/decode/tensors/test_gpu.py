"""What only two GPUs show: both compute at once, in graphs, and the tokens are those of one."""

import pytest
import torch

import gpubound as gb
from gpubound.decode.placement.tensor_parallel import connected
from gpubound.decode.runner import Stepper
from gpubound.kernels import send_words

from ...models.deepseek_v4.decode import cases as compressed
from .. import cases
from ..stages.test_gpu import TWO, served

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma3", "own"])
def test_families_in_fp32(kind):
    """Beside the model's own forward, whose model stays on the CPU; rows of different lengths."""
    fast = gb.decoder(cases.build(kind), 3, cases.ROOM, devices=TWO, split="tensors")
    assert {p.device.type for p in fast.model.parameters()} == {"cpu"}
    cases.assert_greedy(fast, cases.prompts(), 40)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3, "logprobs": True}], ids=["greedy", "sampled"])
def test_streams_of_deepseek_v4(how):
    """In fp32, both devices at once; the greedy tokens are the model's own, whose layers stay on the CPU."""
    model = compressed.build()
    fast = gb.decoder(model, 3, compressed.ROOM, devices=TWO, split="tensors")
    given = [compressed.text(length, seed=length).tolist() for length in (3, 30, 11)]
    found = fast.generate(given, max_new_tokens=20, **how).tokens
    if not how:
        wanted = (compressed.own_logits(model, torch.tensor([*p, *row[:-1]])) for p, row in zip(given, found))
        assert found == [logits[len(p) - 1 :].argmax(-1).tolist() for p, logits in zip(given, wanted)]
    fast.graphs.launch = Stepper(fast.body, fast.slots).run
    assert fast.generate(given, max_new_tokens=20, **how).tokens == found


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 1.0, "top_p": 0.95, "seed": 3, "logprobs": True}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_devices_at_once_give_what_they_give_in_turns(rows, how):
    """In bf16: graphs on both beside single launches, all of which send before any takes."""
    given = cases.prompts(*range(5, 5 + rows))
    fast = gb.decoder(served(), 8, 512, devices=TWO, split="tensors")
    want = fast.generate(given, max_new_tokens=75, **how).tokens
    assert len({token for row in want for token in row}) > 20
    fast.graphs.launch = Stepper(fast.body, fast.slots).run
    assert fast.generate(given, max_new_tokens=75, **how).tokens == want


def test_a_request_waits_for_nothing_on_either_gpu():
    fast = gb.decoder(served(), 4, 512, devices=TWO, split="tensors")
    assert cases.assert_no_syncs(fast, cases.prompts(5), before=3).count == 64


def test_a_device_that_sends_nothing_holds_the_other_once():
    """Not at every exchange: what has asked in vain asks no more, and takes NaN. A request lets it ask again."""
    peers = connected([torch.device(name) for name in TWO], 1, 64)
    y, x = torch.ones(1, 64, device=TWO[0]), torch.zeros(1, 64, device=TWO[0])
    peers[0].wait(1 << 14)
    for _ in range(2):
        send_words(y, peers[0].sum())
        peers[0].add(x, 0)
    assert x.isnan().all() and peers[0].state.tolist() == [1, 0]
    peers[0].wait()
    assert peers[0].state[1] > 1 << 20
