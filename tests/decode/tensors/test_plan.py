"""Which slice goes to which device, by sizes alone, and what is not sliced, sentence by sentence."""

import pytest
import torch

import gpubound as gb
from gpubound.decode.placement import plan as spread, tensor_parallel as body
from gpubound.decode.placement.plan import plan_slices
from tests.messages import message, refusal

from .. import cases


@pytest.mark.parametrize("words, count", [(128256, 2), (89, 4), (64, 4), (49, 4)])
def test_heads_columns_and_words_are_dealt_out(words, count):
    """Every one once, in order; words in whole stretches, but for the last."""
    plans = plan_slices(words, [], [torch.device("cuda", number) for number in range(count)], 16)
    assert [n for plan in plans for n in plan.words] == list(range(words))
    assert all(plan.words and plan.words.start % 16 == 0 for plan in plans)
    assert [n for plan in plans for n in range(32)[plan.of(32)]] == list(range(32))
    assert [plan.device.index for plan in plans] == list(range(count))


def refused(error: type[Exception] = ValueError, model=None, **options) -> str:
    options = {"max_batch": 2, "max_length": cases.ROOM, "devices": ["cpu", "cpu"], "split": "tensors"} | options
    return refusal(error, lambda: gb.decoder(model or cases.build("Llama"), **options))


NOT_SLICED = {
    "heads": ("Llama", {}, 3, "its 2 key and value heads do not divide by 3"),
    "columns": ("Llama", {"intermediate_size": 45}, 2, "layer 0 has 45 columns in its MLP, which do not divide by 2"),
    "words": ("Llama", {"vocab_size": 16}, 2, "its 16 words are fewer than 16 a device"),
    "experts": ("Mixtral", {}, 2, "layer 0 is a mixture of experts, of which none is sliced"),
    "norms": ("Olmo2", {}, 2, "layer 0 norms all heads of a row together, which are on different devices"),
}


@pytest.mark.parametrize("kind, options, count, why", NOT_SLICED.values(), ids=NOT_SLICED)
def test_models_that_do_not_divide(kind, options, count, why):
    assert refused(model=cases.build(kind, **options), devices=["cpu"] * count) == (
        message("decode/tensors/plan:models_that_do_not_divid", count, why)
    )


def test_what_is_not_split_so():
    assert refused(max_batch=9) == message("decode/tensors/plan:what_is_not_split_so")
    assert refused(devices=None) == message("decode/tensors/plan:what_is_not_split_so.2")
    assert refused(split="rows") == message("decode/tensors/plan:what_is_not_split_so.3")
    assert refused(speculate=2) == message("decode/tensors/plan:what_is_not_split_so.4")
    assert refused(model=cases.build("Llama", hidden_act="relu")).startswith(
        "decoder: devices: got 2, which only the fused kernels run on, and its activation is 'relu'"
    )


def test_a_slice_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(body, "free_bytes", lambda devices: [10**9, 50_000])
    assert refused() == message("decode/tensors/plan:a_slice_that_does_not_fi")


def test_gpus_that_do_not_reach_each_other(monkeypatch):
    """Stages hand over in a ring of neighbours; here the first and the third need each other too."""
    monkeypatch.setattr(spread, "resolve", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: abs(one.index - other.index) != 2)
    assert refused(gb.DeviceError, devices=[f"cuda:{n}" for n in range(4)]) == (
        message("decode/tensors/plan:gpus_that_do_not_reach_e")
    )
