"""What is not decoded over several devices, sentence by sentence. What a machine's GPUs say is made up here."""

import pytest
import torch

import gpubound as gb
from gpubound.decode import bind
from gpubound.decode.contract import Build
from gpubound.decode.stages import spread
from gpubound.decode.stages.body import fused_reader
from gpubound.models.decoding import Reader

from .. import cases


def refused(error: type[Exception] = ValueError, model=None, **options) -> str:
    with pytest.raises(error) as caught:
        gb.decoder(model or cases.build("Llama"), 2, **{"max_length": cases.ROOM, "devices": ["cpu", "cpu"]} | options)
    return str(caught.value)


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs, of which the fourth is another kind and the third reaches nobody's memory."""
    monkeypatch.setattr(spread, "resolve", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index == 3 else (9, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: 2 not in (one.index, other.index))


def test_devices_that_do_not_work_together(gpus):
    assert refused(devices=["cuda:0", "cuda:0"]) == "decoder: devices: got cuda:0 twice, wanted different GPUs; name each once."
    assert refused(devices=["cuda:0", "cpu"]) == (
        "decoder: devices: got cuda:0 and cpu, wanted devices of one kind: all GPUs, or a CPU to try a plan."
    )
    assert refused(devices=["cuda:1", "cuda:3"]) == (
        "decoder: devices: cuda:1 has compute capability 9.0 and cuda:3 has compute capability 8.0, wanted GPUs of one kind."
    )
    assert refused(gb.DeviceError, devices=["cuda:0", "cuda:1", "cuda:2"]) == (
        "decoder: devices: cuda:1 may not reach the memory of cuda:2, and stages hand rows over by such copies. What to do: "
        "name GPUs that `nvidia-smi topo -p2p r` shows as OK for each other, or leave devices out."
    )


def test_what_is_no_list_of_two_devices():
    assert refused(devices="cuda:0") == (
        "decoder: devices: got 'cuda:0', wanted a list of devices, such as ['cuda:0', 'cuda:1']."
    )
    assert refused(devices=["cpu"]) == "decoder: devices: got 1, wanted two or more; leave devices out to decode on one."
    assert refused(split=["tensors"]) == "decoder: split: got ['tensors'], wanted 'layers' or 'tensors'."
    assert "device='cuda:7'" in refused(gb.DeviceError, devices=["cpu", "cuda:7"])


def test_a_stage_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(spread, "host_bytes", lambda: 0)
    assert refused(max_length=4096 * 64).startswith("decoder: devices: stage 0 does not fit: the embedding, the head and one")
    assert refused(devices=["cpu"] * 3).startswith("decoder: devices: got 3 devices for 2 layers")


@pytest.mark.parametrize("options", [{"speculate": 2}, {"weights": "int8"}, {"fused": False}], ids=str)
def test_what_takes_a_single_device(options):
    name = "fused=False" if "fused" in options else next(iter(options))
    assert refused(**options) == f"decoder: devices: got 2 together with {name}, which takes a single device."


def test_weights_that_lie_on_two_kinds_of_device():
    """Stages put them where they belong, slices leave them where they are; what holds no values is refused by both."""
    model = cases.build("Llama")
    model.lm_head.to("meta")  # the only second kind that is everywhere
    assert isinstance(bind.examine(model, cases.ROOM, bind.ANYWHERE), Reader)
    why = (
        "its weights differ in dtype or device: torch.float32 on cpu, torch.float32 on meta; move all of it to the CPU, or to "
        "GPUs"
    )
    assert bind.examine(model, cases.ROOM, spread=True) == why
    with pytest.raises(ValueError) as caught:
        fused_reader(model, Build(1, cases.ROOM), 2, spread=True)
    assert str(caught.value) == f"decoder: devices: got 2, which only the fused kernels run on, and {why}."
    for split in ("layers", "tensors"):
        assert refused(model=model, split=split) == (
            "decoder: model: got LlamaForCausalLM on meta, which holds no values; load its weights first."
        )
    half = cases.build("Llama")
    half.lm_head.half()
    assert bind.examine(half, cases.ROOM, bind.ANYWHERE) == (
        "its weights differ in dtype or device: torch.float16 on cpu, torch.float32 on cpu"
    )


def test_models_that_are_decoded_on_one():
    assert refused(model=cases.build("Llama", hidden_act="relu")) == (
        "decoder: devices: got 2, which only the fused kernels run on, and its activation is 'relu', the kernels' are silu, "
        "gelu, gelu_tanh."
    )
    adapted = cases.build("Llama")
    gb.lora.add(adapted, 4)
    assert refused(model=adapted) == (
        "decoder: devices: got 2 for a model with low-rank adapters, which are added on one device alone; merge them, switch "
        "them off, or leave devices out."
    )
