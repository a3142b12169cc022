"""What only two GPUs show: the same tokens as one, graphs on both, no wait, the model's own forward across them."""

import pytest
import torch

import gpubound as gb
from gpubound.decode.placement.pipeline import Handover, StageGraphs
from gpubound.decode.runner import Stepper
from tests.messages import message

from ...models.deepseek_v4.decode import cases as compressed
from .. import cases
from ..test_gpu import SERVED

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]
TWO = ["cuda:0", "cuda:1"]


SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 3, "logprobs": True}


def served(dtype: torch.dtype = torch.bfloat16, **options) -> torch.nn.Module:
    return cases.scaled(cases.build("Llama", dtype, "cuda:0", **SERVED | {"num_hidden_layers": 6} | options))


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows, dtype", [(1, torch.bfloat16), (2, torch.float32)], ids=["1", "2 in fp32"])
def test_two_gpus_give_the_tokens_of_one(rows, dtype, how):
    """Rows that are computed by the same kernels alone and beside others: in bf16 two go through tensor cores together."""
    given = cases.prompts(*range(5, 5 + rows))
    want = gb.decoder(served(dtype), 8, 512).generate(given, max_new_tokens=75, **how).tokens
    fast = gb.decoder(served(dtype), 8, 512, devices=TWO)
    assert fast.body.same_kernels(rows)
    assert {p.device.index for p in fast.model.parameters()} == {0, 1}
    assert fast.generate(given, max_new_tokens=75, **how).tokens == want
    assert len({token for row in want for token in row}) > 20
    fast.graphs.launch = Stepper(fast.body, fast.slots).run  # all rows at once, kernel by kernel
    assert fast.generate(given, max_new_tokens=75, **how).tokens == want


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [2, 8, 16])
def test_graphs_of_lanes_give_what_their_kernels_give_one_by_one(rows, how, monkeypatch):
    """In bf16, in lanes of one row, and of several that go through tensor cores."""
    fast = gb.decoder(served(), 16, 512, devices=TWO)
    given = cases.prompts(*range(5, 5 + rows))
    found = fast.generate(given, max_new_tokens=75, **how).sequences
    monkeypatch.setattr(StageGraphs, "_capture", lambda stages, lane: None)
    fast.graphs.clear()
    assert fast.generate(given, max_new_tokens=75, **how).sequences == found
    assert len({token for sequence in found for token in sequence.tokens}) > 20


def test_a_lane_is_handed_over_while_both_devices_work_on_another():
    """A copy in a default stream would wait for the work that was asked of either device before, and hold up what follows."""
    here, there = (Handover(1, 4, torch.device(name)) for name in TWO)
    here.send(there)  # the first one lets each device reach the other's memory
    for name in TWO:
        torch.cuda.synchronize(name)
    here.flat.fill_(7)
    busy = []
    for name in reversed(TWO):
        with torch.cuda.device(name):
            if name == TWO[0]:  # its own work on the lane is done, and it begins the next one's
                here.send(there)
            torch.cuda._sleep(4_000_000_000)  # 2 s
            busy.append(torch.cuda.Event())
            busy[-1].record()
    there.copies.arrived.synchronize()
    assert not any(event.query() for event in busy)
    there.receive()
    assert there.flat.eq(7).all()


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3", "Mixtral", "own"])
def test_families_from_the_cpu_to_two_gpus(kind):
    """In fp32, beside the model's own forward, which goes on working."""
    fast = gb.decoder(cases.build(kind, **({} if kind == "own" else {"num_hidden_layers": 2})), 3, cases.ROOM, devices=TWO)
    cases.assert_greedy(fast, cases.prompts(), 40)


@pytest.mark.parametrize("rows", [1, 4])
def test_deepseek_v4_on_two_gpus(rows):
    """In fp32, beside the model's own logits."""
    fast = gb.decoder(compressed.build(), 4, compressed.ROOM, devices=TWO)
    given = [compressed.text(length, seed=length).tolist() for length in (30, 3, 11, 1)[:rows]]
    found = fast.generate(given, max_new_tokens=40).tokens
    for prompt, row in zip(given, found):
        logits = compressed.own_logits(fast.model, torch.tensor([*prompt, *row[:-1]]))
        assert row == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_a_model_that_one_gpu_cannot_hold():
    """As far as this process may take memory: 3.5 GB of each, of a model that takes 4."""
    wide = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    model = served(**wide, num_hidden_layers=9, vocab_size=32000).cpu()
    torch.cuda.empty_cache()
    assert sum(p.nbytes for p in model.parameters()) > 4e9
    try:
        for number in (0, 1):
            mine = torch.cuda.memory_reserved(number) + 3.5e9
            torch.cuda.set_per_process_memory_fraction(mine / torch.cuda.get_device_properties(number).total_memory, number)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            model.to("cuda:0")  # which leaves the last layers on the CPU
        assert {p.device.type for p in model.parameters()} == {"cpu", "cuda"}
        fast = gb.decoder(model, 1, 128, verify="quick", devices=TWO)
        assert {str(p.device) for p in model.parameters()} == set(TWO)
        assert fast.generate(cases.prompts(5), max_new_tokens=20).count == 20
    finally:
        for number in (0, 1):
            torch.cuda.set_per_process_memory_fraction(1.0, number)


@pytest.mark.parametrize("rows", [1, 16])
def test_a_request_waits_for_nothing_on_either_gpu(rows):
    fast = gb.decoder(served(), 16, 512, devices=TWO)
    assert cases.assert_no_syncs(fast, cases.prompts(*range(5, 5 + rows))).count == 64 * rows


@pytest.mark.parametrize("split", ["layers", "tensors"])
def test_a_model_that_is_spread_trains_and_the_next_token_sees_it(split):
    fast = gb.decoder(cases.build("Llama", device="cuda:0"), 2, cases.ROOM, devices=TWO, split=split)
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
    with pytest.raises(gb.DeviceError, check=message("decode/stages/gpu:a_gpu_that_is_not_there", count)):
        gb.decoder(cases.build("Llama"), 1, 64, devices=["cuda:0", f"cuda:{count}"])
