"""A model that stays in host memory while its rounded weights are on another device: same tokens, changes found, refusals."""

import weakref

import pytest
import torch
import torch.nn.functional as F

import gpubound as gb
from gpubound.decode import generate
from gpubound.decode.certificate import RoundedModel, reference_stages
from gpubound.models import decoding
from gpubound.models.decoding import Linear, plain_linear
from gpubound.models.llama import Decoder, DecoderConfig

PROMPT, SETTINGS = [[3, 1, 4, 1, 5]], {"max_new_tokens": 3, "stop": ()}


def made(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(32, 64, 1, 2, 1, 64, tied=False), dtype=dtype).to(device).eval()


def tokens(decoder) -> list[int]:
    return decoder.generate(PROMPT, **SETTINGS).sequences[0].tokens


@pytest.fixture
def pretended(sim, monkeypatch):
    """The pretend device, which no option of a command names."""
    monkeypatch.setattr(generate, "resolve", lambda device: device)
    return sim


@pytest.mark.slow
def test_tokens_and_certificate_are_those_of_a_model_on_the_device(pretended):
    model, there = made(), made().to(pretended)
    hosted = gb.decoder(model, max_length=16, k=1, weights="int4", device=pretended)
    plain = gb.decoder(there, max_length=16, k=1, weights="int4")
    assert tokens(hosted) == tokens(plain)
    assert hosted.certificate.logits_error == pytest.approx(plain.certificate.logits_error, abs=1e-6)
    body = hosted.body
    parts = [part for layer in body.layers for part in layer if part is not None]
    held = [body.embed, body.head.parts[0].words, *(t for part in parts for t in part.tensors())]
    assert {t.device for t in held} == {pretended} and {p.device.type for p in model.parameters()} == {"cpu"}
    for one in (model, there):
        with torch.no_grad():
            one.model.layers[0].mlp.down_proj.weight.mul_(-4)
            one.model.norm.weight.mul_(2)
    assert tokens(hosted) == tokens(plain), "weights that change are packed again"


def test_what_cannot_be_on_another_device_is_refused(pretended):
    for options, wanted in (({}, "own weights"), ({"weights": "int4", "speculate": gb.Draft(made(), 2)}, "a draft")):
        with pytest.raises(ValueError, match=rf"device: got {pretended} for a model on cpu together with .*{wanted}"):
            gb.decoder(made(), device=pretended, **options)


@pytest.mark.gpu
def test_from_host_memory_to_the_gpu():
    """Pageable weights, packed part by part: the words of weights that were moved first, and no 16-bit matrix on the GPU."""
    model = made(dtype=torch.bfloat16)
    hosted = gb.decoder(model, max_length=16, k=1, weights="int4", device="cuda")
    plain = gb.decoder(made("cuda", torch.bfloat16), max_length=16, k=1, weights="int4")
    assert hosted.body.head.parts[0].words.equal(plain.body.head.parts[0].words)
    assert tokens(hosted) == tokens(plain) and {p.device.type for p in model.parameters()} == {"cpu"}


def test_the_definition_holds_one_part_in_fp32_at_a_time(monkeypatch):
    """A layer of 8B takes 0.9 GB in fp32: in 8 GB that was too much next to its int4 weights."""
    torch.manual_seed(0)
    config = DecoderConfig(32, 64, 3, 2, 1, 64, tied=False)
    body = gb.decoder(Decoder(config).eval(), max_length=16, k=1, weights="int4", verify="quick").body
    made_parts = list[weakref.ref]()

    def counted(exact):
        def count():
            assert all(each() is None for each in made_parts)
            part = exact()
            made_parts.append(weakref.ref(part))
            return part

        return count

    for part in (part for layer in body.layers for part in (layer.attention, layer.mlp)):
        monkeypatch.setattr(part, "exact", counted(part.exact))
    names = [name for name, _ in reference_stages(RoundedModel(body), torch.tensor([1, 2, 3]))]
    assert len(made_parts) == 6 and names[-3:] == ["model.layers.2.mlp", "model.norm", "lm_head"]


def test_the_definition_reads_host_memory_by_parts(sim, monkeypatch):
    sizes = list[int]()
    monkeypatch.setattr(decoding, "AT_ONCE", 64)
    monkeypatch.setattr(decoding.F, "linear", lambda x, w, linear=F.linear: sizes.append(w.numel()) or linear(x, w))
    x, layer = torch.randn(2, 16), Linear(torch.randn(10, 16), torch.randn(10))
    y = plain_linear(x.to(sim), layer._replace(bias=layer.bias.to(sim)))
    assert sizes == [64, 64, 32] and y.device == sim
    torch.testing.assert_close(y.cpu(), x @ layer.weight.t() + layer.bias)
