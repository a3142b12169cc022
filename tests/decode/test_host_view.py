"""A model that stays in host memory while its rounded weights are on another device: same tokens, changes found, refusals."""

import pytest
import torch

import gpubound as gb
from gpubound.decode import generate
from gpubound.models.llama import Decoder, DecoderConfig
from gpubound.watch.pretend import simgpu

PROMPT, SETTINGS = [[3, 1, 4, 1, 5]], {"max_new_tokens": 3, "stop": ()}


def made(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(32, 64, 1, 2, 1, 64, tied=False), dtype=dtype).to(device).eval()


def tokens(decoder) -> list[int]:
    return decoder.generate(PROMPT, **SETTINGS).sequences[0].tokens


@pytest.fixture
def device(monkeypatch):
    """The pretend device, which no option of a command names."""
    monkeypatch.setattr(generate, "resolve", lambda device: device)
    return simgpu()


@pytest.mark.slow
def test_tokens_and_certificate_are_those_of_a_model_on_the_device(device):
    model, there = made(), made().to(device)
    hosted = gb.decoder(model, max_length=16, k=1, weights="int4", device=device)
    plain = gb.decoder(there, max_length=16, k=1, weights="int4")
    assert tokens(hosted) == tokens(plain)
    assert hosted.certificate.logits_error == pytest.approx(plain.certificate.logits_error, abs=1e-6)
    body = hosted.body
    held = [body.embed, body.head.parts[0].words, *(t for layer in body.layers for part in layer for t in part.tensors())]
    assert {t.device for t in held} == {device} and {p.device.type for p in model.parameters()} == {"cpu"}
    for one in (model, there):
        with torch.no_grad():
            one.model.layers[0].mlp.down_proj.weight.mul_(-4)
            one.model.norm.weight.mul_(2)
    assert tokens(hosted) == tokens(plain), "weights that change are packed again"


def test_what_cannot_be_on_another_device_is_refused(device):
    for options, wanted in (({}, "own weights"), ({"weights": "int4", "speculate": gb.Draft(made(), 2)}, "a draft")):
        with pytest.raises(ValueError, match=rf"device: got {device} for a model on cpu together with .*{wanted}"):
            gb.decoder(made(), device=device, **options)


@pytest.mark.gpu
def test_from_host_memory_to_the_gpu():
    """Pageable weights, packed part by part: the words of weights that were moved first, and no 16-bit matrix on the GPU."""
    model = made(dtype=torch.bfloat16)
    hosted = gb.decoder(model, max_length=16, k=1, weights="int4", device="cuda")
    plain = gb.decoder(made("cuda", torch.bfloat16), max_length=16, k=1, weights="int4")
    assert hosted.body.head.parts[0].words.equal(plain.body.head.parts[0].words)
    assert tokens(hosted) == tokens(plain) and {p.device.type for p in model.parameters()} == {"cpu"}
