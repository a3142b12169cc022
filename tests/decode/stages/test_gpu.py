"""What only two GPUs show: the same tokens as one, graphs on both, no wait, the model's own forward across them."""

import pytest
import torch

import gpubound as gb
from gpubound.decode.steps import Stepper
from gpubound.watch import watch

from .. import cases
from ..test_gpu import SERVED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, and fewer are visible"),
]
TWO = ["cuda:0", "cuda:1"]


def served(kind: str = "Llama", device: str = "cuda:0", **options) -> torch.nn.Module:
    model = cases.build(kind, torch.bfloat16, device, **SERVED | {"num_hidden_layers": 6} | options)
    with torch.no_grad():  # 0.2, as for 32 wide, would let one word win everywhere
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.2)
    return model


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 1.0, "top_p": 0.95, "seed": 3, "logprobs": True}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_two_gpus_give_the_tokens_of_one(rows, how):
    """Rows in few enough numbers that each is computed by the same kernels alone and beside others."""
    given = cases.prompts(*range(5, 5 + rows))
    want = gb.decoder(served(), 8, 512).generate(given, max_new_tokens=75, **how).tokens
    fast = gb.decoder(served(), 8, 512, devices=TWO)
    assert {p.device.index for p in fast.model.parameters()} == {0, 1}
    assert fast.generate(given, max_new_tokens=75, **how).tokens == want
    assert len({token for row in want for token in row}) > 20
    fast.graphs.launch = Stepper(fast.body, fast.slots).run  # all rows at once, kernel by kernel
    assert fast.generate(given, max_new_tokens=75, **how).tokens == want


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3", "Mixtral", "own"])
def test_families_from_the_cpu_to_two_gpus(kind):
    """In fp32, beside the model's own forward, which goes on working."""
    fast = gb.decoder(cases.build(kind, **({} if kind == "own" else {"num_hidden_layers": 2})), 3, cases.ROOM, devices=TWO)
    given = cases.prompts()
    found = fast.generate(given, max_new_tokens=40).tokens
    assert found == [cases.likeliest(fast.model, prompt, row) for prompt, row in zip(given, found)]


@pytest.mark.parametrize("rows", [1, 16])
def test_a_request_waits_for_nothing_on_either_gpu(rows):
    fast = gb.decoder(served(), 16, 512, devices=TWO)
    given = cases.prompts(*range(5, 5 + rows))
    for _ in range(2):
        fast.generate(given, max_new_tokens=64)
    for device in TWO:
        torch.cuda.synchronize(device)
    with watch(gputrace=True) as ledger:
        found = fast.generate(given, max_new_tokens=64)
    assert ledger.totals["syncs"] == 0, str(ledger)
    assert found.count == 64 * rows


def test_a_model_that_is_spread_trains_and_the_next_token_sees_it():
    fast = gb.decoder(cases.build("Llama", device="cuda:0"), 2, cases.ROOM, devices=TWO)
    optimizer = torch.optim.AdamW(fast.model.parameters(), lr=0.05)
    captured = len(fast.graphs)
    for _ in range(2):
        ids = torch.tensor([cases.prompts(20)[0]], device="cuda:0")
        fast.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = fast.generate(cases.PROMPT, max_new_tokens=24).tokens[0]
        assert found == cases.likeliest(fast.model, cases.PROMPT, found)
    assert len(fast.graphs) >= captured


def test_a_gpu_that_is_not_there():
    count = torch.cuda.device_count()
    with pytest.raises(gb.DeviceError, match=f"there is no GPU {count}: {count} visible, counted from 0"):
        gb.decoder(cases.build("Llama"), 1, 64, devices=["cuda:0", f"cuda:{count}"])
