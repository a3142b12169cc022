"""What is not decoded over several devices, sentence by sentence. What a machine's GPUs say is made up here."""

import pytest
import torch

import gpubound as gb
from gpubound.decode import weight_view
from gpubound.decode.placement import plan as spread
from gpubound.decode.placement.pipeline import fused_reader
from gpubound.decode.runner import RunnerConfig
from gpubound.models.reader import Reader
from tests.messages import message, refusal

from .. import cases


def refused(error: type[Exception] = ValueError, model=None, **options) -> str:
    options = {"max_length": cases.ROOM, "devices": ["cpu", "cpu"]} | options
    return refusal(error, lambda: gb.decoder(model or cases.build("Llama"), 2, **options))


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs, of which the fourth is another kind and the third reaches nobody's memory."""
    monkeypatch.setattr(spread, "resolve", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index == 3 else (9, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: 2 not in (one.index, other.index))


def test_devices_that_do_not_work_together(gpus):
    assert refused(devices=["cuda:0", "cuda:0"]) == message("decode/stages/refusals:devices_that_do_not_work")
    assert refused(devices=["cuda:0", "cpu"]) == message("decode/stages/refusals:devices_that_do_not_work.2")
    assert refused(devices=["cuda:1", "cuda:3"]) == message("decode/stages/refusals:devices_that_do_not_work.3")
    assert refused(gb.DeviceError, devices=["cuda:0", "cuda:1", "cuda:2"]) == (
        message("decode/stages/refusals:devices_that_do_not_work.4")
    )


def test_what_is_no_list_of_two_devices():
    assert refused(devices="cuda:0") == message("decode/stages/refusals:what_is_no_list_of_two_d")
    assert refused(devices=["cpu"]) == message("decode/stages/refusals:what_is_no_list_of_two_d.2")
    assert refused(split=["tensors"]) == message("decode/stages/refusals:what_is_no_list_of_two_d.3")
    assert "device='cuda:7'" in refused(gb.DeviceError, devices=["cpu", "cuda:7"])


def test_a_stage_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(spread, "host_bytes", lambda: 0)
    assert refused(max_length=4096 * 64).startswith("decoder: devices: stage 0 does not fit: the embedding, the head and one")
    assert refused(devices=["cpu"] * 3).startswith("decoder: devices: got 3 devices for 2 layers")


@pytest.mark.parametrize("options", [{"speculate": 2}, {"weights": "int8"}, {"fused": False}], ids=str)
def test_what_takes_a_single_device(options):
    name = "fused=False" if "fused" in options else next(iter(options))
    assert refused(**options) == message("decode/stages/refusals:what_takes_a_single_devi", name)


def test_weights_that_lie_on_two_kinds_of_device():
    """Stages put them where they belong, slices leave them where they are; what holds no values is refused by both."""
    model = cases.build("Llama")
    model.lm_head.to("meta")  # the only second kind that is everywhere
    assert isinstance(weight_view.readable_model(model, cases.ROOM, weight_view.ANYWHERE), Reader)
    why = (
        "its weights differ in dtype or device: torch.float32 on cpu, torch.float32 on meta; move all of it to the CPU, or to "
        "GPUs"
    )
    assert weight_view.readable_model(model, cases.ROOM, spread=True) == why
    assert refusal(ValueError, lambda: fused_reader(model, RunnerConfig(1, cases.ROOM), 2, spread=True)) == message(
        "decode/stages/refusals:weights_that_lie_on_two", why
    )
    for split in ("layers", "tensors"):
        assert refused(model=model, split=split) == message("decode/stages/refusals:weights_that_lie_on_two.2")
    half = cases.build("Llama")
    half.lm_head.half()
    wanted = message("decode/stages/refusals:weights_that_lie_on_two.3")
    assert weight_view.readable_model(half, cases.ROOM, weight_view.ANYWHERE) == wanted


def test_models_that_are_decoded_on_one():
    assert refused(model=cases.build("Llama", hidden_act="relu")) == message("decode/stages/refusals:models_that_are_decoded")
    adapted = cases.build("Llama")
    gb.lora.add(adapted, 4)
    assert refused(model=adapted) == message("decode/stages/refusals:models_that_are_decoded.2")
