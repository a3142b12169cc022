"""The host stays out of the loop: nothing waits for the device, a launch costs one copy, and nothing grows."""

import gc
from concurrent.futures import wait

import pytest
import torch
from torch._subclasses import FakeTensor

import gpubound as gb
from gpubound.decode.runner import SamplingVariant
from gpubound.kernels import dispatch
from gpubound.watch import no_stall, watch

from . import cases

HOW = {"greedy": {}, "all settings": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mistral", "Qwen3", "SmolLM3"])
def test_steps_never_wait_for_the_device(kind, sim):
    """The kernels' references, but the same calls around them; every op is seen by the pretend device. Windows, normed heads, a
    layer without positions."""
    fast = gb.decoder(cases.build(kind, device=sim), 2, 32, verify=False)
    assert fast.path == ""
    fast.generate(cases.prompts(5, 3), max_new_tokens=1, temperature=1.0, repetition_penalty=1.1)
    cases.assert_never_waits(fast.graphs.run, 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_a_request_waits_for_nothing_and_copies_the_tokens_alone(how, sim):
    fast = gb.decoder(cases.build("Qwen3", device=sim), 4, cases.ROOM, verify=False)
    settings = {"max_new_tokens": 10, "stop": 3, "seed": 1, **HOW[how]}
    with watch() as ledger:
        found = fast.generate(cases.prompts(), **settings)
    assert found.tokens == cases.shared("Qwen3").generate(cases.prompts(), **settings).tokens
    block = 4 * (2 * 32 + 2) * 4  # int32: 32 steps of tokens and logprobs, alive and bad, for 4 rows
    assert ledger.totals["d2h_bytes"] == found.launches * block and ledger.totals["d2h_copies"] == found.launches
    assert ledger.totals["syncs"] == 0, str(ledger)
    assert all(row.detail.startswith("pinned") for row in ledger.rows if row.kind == "d2h")


def held() -> tuple[int, int]:
    """(bytes of live tensors, how many objects the collector knows). What torch.compile traced in another test has no bytes."""
    gc.collect()
    objects = gc.get_objects()
    tensors = (o for o in objects if issubclass(type(o), torch.Tensor) and not issubclass(type(o), FakeTensor))
    return sum(o.nbytes for o in tensors), len(objects)


@pytest.mark.slow
def test_400_tokens_leave_nothing_behind():
    """Requests of every kind, then the same ones again, many times."""
    fast = gb.decoder(cases.build("Llama"), 4, cases.ROOM, tokenizer=cases.Bytes())

    def round_of(requests: int) -> int:
        count = 0
        for number in range(requests):
            how = ({}, {"temperature": 1.0, "seed": number}, {"repetition_penalty": 1.1, "logprobs": True})[number % 3]
            count += fast.generate(cases.prompts(3, 9, 1, 7), max_new_tokens=9, stop=["\x05\x06"], **how).count
            next(fast.stream([3, 4], max_new_tokens=9))  # and left
        return count

    round_of(6)
    before, tokens = held(), 0
    while tokens < 400:
        tokens += round_of(6)
    after = held()  # less is no fault: what earlier tests have left may go in between
    assert after[0] <= before[0] and after[1] <= before[1] + 20


@pytest.mark.gpu
def test_10000_tokens_leave_nothing_behind_on_the_device():
    device = torch.device("cuda", 0)
    fast = gb.decoder(cases.build("Llama", torch.bfloat16, device, max_position_embeddings=512), 8, 512)
    for settings in ({}, {"temperature": 1.0}):
        fast.generate(cases.prompts(*range(1, 9)), **settings)
    wait([*dispatch._early.values()])  # self-tests that nobody has asked after yet hold memory of their own
    gc.collect()  # what an earlier test has left in cycles goes now, not in between
    torch.cuda.synchronize()
    before, tokens = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), held()[1]), 0
    while tokens < 10_000:
        for settings in ({}, {"temperature": 1.0, "seed": tokens}):
            tokens += fast.generate(cases.prompts(*range(1, 9)), **settings).count
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), held()[1]
    assert after[0] <= before[0] and after[1] <= before[1] and after[2] <= before[2] + 20


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rows", [1, 12])
def test_a_request_waits_for_nothing_on_the_device(how, rows):
    fast = gb.decoder(cases.build("Qwen3", torch.bfloat16, torch.device("cuda", 0)), rows, cases.ROOM)
    given = cases.prompts(*range(3, 3 + rows))
    found = cases.assert_no_syncs(fast, given, seed=1, **HOW[how])
    assert found.launches == 12 and found.count == 64 * rows  # of 1, 8, 32, 8, 8 and seven of 1


@pytest.mark.gpu
def test_a_captured_launch_is_only_a_launch():
    """Under the guard, sampler, stop tokens, embedding and cache included."""
    fast = gb.decoder(cases.build("Mistral", torch.bfloat16, torch.device("cuda", 0)), 4, cases.ROOM)
    fast.generate(cases.prompts(5, 9, 4), max_new_tokens=41, temperature=1.0)
    with no_stall():
        for k in fast.ladder:
            fast.graphs.launch(4, k, SamplingVariant(greedy=False))
            fast.slots.send(k)
    fast.slots.drop()
