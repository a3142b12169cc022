"""The decoder against Hugging Face's own models: loss and every gradient, both ways through a folder."""

import copy
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.utils import parametrize, prune

from gpubound.errors import DataError
from gpubound.layers.embedding_and_head import embedding
from gpubound.models import PRESETS, Decoder, DecoderConfig, RichardsConfig, RichardsDecoder, load_hf, save_hf
from tests.messages import message

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama, tied, own head width": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"tie_word_embeddings": True, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "llama 3.1": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {
            "head_dim": 32,  # pairs that turn at their own frequency, at an eighth, and between
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 8}),
}


def hf_model(family, seed=0):
    config, kind, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model = kind(config(**SHAPE | extra)).double().train()
    with torch.no_grad():
        for parameter in model.parameters():  # gains and biases at their start would hide a missing one
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def a_batch():
    ids = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return ids, labels


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_hugging_faces(family, tmp_path, monkeypatch):
    """In fp64 through the reference kernels, so that the comparison is of the model and not of rounding."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path)
    ours = load_hf(tmp_path).double()
    ids, labels = a_batch()
    want = theirs(input_ids=ids, labels=labels).loss
    want.backward()
    got = ours.loss(ids, labels)
    got.backward()
    assert abs(got.item() - want.item()) < 1e-6 * want.item()
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        error = (parameter.grad - wanted[name].grad).norm() / wanted[name].grad.norm()
        assert error < 1e-6, f"{name}: gradient off by {error:.1e}"
    assert {n for n, _ in ours.named_parameters()} == set(wanted)


@pytest.mark.parametrize(
    "options", [{}, {"tied": True}, {"qkv_bias": True}, {"qk_norm": True}, {"rope_factor": 8.0, "rope_positions": 16}], ids=str
)
def test_an_export_loads_to_the_same_logits(options, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    torch.manual_seed(0)
    ours = Decoder(DecoderConfig(32, 48, 2, 4, 2, 96, **options)).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(save_hf(ours, tmp_path)).eval()
    ids, _ = a_batch()
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, ours(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("total", [None, 5.0])
@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.register_forward_hook(lambda module, inputs, logits: 2 * logits),
        lambda head: prune.l1_unstructured(head, "weight", 0.5),
        lambda head: parametrize.register_parametrization(head, "weight", nn.Tanh()),
    ],
    ids=["hook", "pruned", "parametrized"],
)
def test_the_loss_is_of_the_logits_that_the_head_gives(change, total):
    """Without whole logits it reads the head's weight, and would pass over what else the head does."""
    torch.manual_seed(0)
    model, (ids, labels) = Decoder(dataclasses.replace(PRESETS["tiny"], tied=False)).double(), a_batch()
    change(model.lm_head)
    with torch.no_grad():
        model(ids)  # pruning's hook, which leaves a weight without a graph behind
    logits, wanted = model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    want = F.cross_entropy(logits, wanted, reduction="mean" if total is None else "sum") / (total or 1)
    got = model.loss(ids, labels, total=total)
    torch.testing.assert_close(got.double(), want)
    torch.autograd.grad(got, list(model.parameters()))  # each has a part in it


def test_no_token_sees_a_later_one(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    torch.manual_seed(0)
    model = Decoder(PRESETS["tiny"]).double().eval()
    ids, _ = a_batch()
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 96
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7:], after[:, 7:])


@pytest.mark.slow
def test_torch_compile_takes_rows_of_any_length(monkeypatch):
    """From the second length on, sizes are symbols to it."""
    monkeypatch.setattr("gpubound.device.interpreted", lambda: False)
    model = Decoder(DecoderConfig(hidden=16, intermediate=24, layers=1, heads=2, kv_heads=1, vocabulary=32))
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True, dynamic=True)
    for length in (5, 7):
        ids, gradients = torch.arange(2 * length).view(2, length), []
        for one in (model, compiled):
            one.zero_grad()
            one(ids).square().sum().backward()
            gradients.append([p.grad for p in one.parameters()])
        torch.testing.assert_close(*gradients)


def test_positions_given_are_positions_used(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    torch.manual_seed(0)
    model, (ids, _) = Decoder(PRESETS["tiny"]).eval(), a_batch()
    with torch.no_grad():
        default = model(ids)
        torch.testing.assert_close(model(ids, torch.arange(12).expand(2, 12)), default)
        assert not torch.allclose(model(ids, 3 * torch.arange(12).expand(2, 12)), default)


@pytest.mark.parametrize(
    "name,millions", [("tiny", 0.09), ("10m", 10), ("135m", 134), ("350m", 432), ("1b", 1236), ("8b", 8030)]
)
def test_presets_are_their_size(name, millions):
    """Counted on the meta device. 350m's makers left the embedding out: its head and its blocks are 365 + 33 million."""
    model = Decoder(PRESETS[name], device="meta")
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(millions * 1e6, rel=0.05)
    table = 0 if PRESETS[name].tied else PRESETS[name].vocabulary * PRESETS[name].hidden
    small = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert PRESETS[name].product_parameters == count - table - small


@pytest.mark.parametrize(
    "change,named",
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', wanted one of llama, mistral, qwen2, qwen3, llada, Dream"),
        ({"hidden_act": "gelu"}, "the decoder has no hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "the decoder has no rope scaling 'yarn'"),
        ({"model_type": "mistral", "sliding_window": 16}, "the decoder has no sliding window shorter than its positions"),
        # a field that Mistral does not have
        (
            {"model_type": "mistral", "sliding_window": 16, "use_sliding_window": False},
            "the decoder has no sliding window shorter than its positions",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "the decoder has no bias on o_proj"),
        ({"mlp_bias": True}, "the decoder has no bias on the MLP"),
    ],
)
def test_what_it_cannot_do_is_refused(change, named, tmp_path):
    save_hf(Decoder(PRESETS["tiny"]), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(DataError, match=f"{tmp_path}: {named}; use transformers with gb.place"):
        load_hf(tmp_path)


def test_weights_of_another_model(tmp_path):
    save_hf(Decoder(PRESETS["tiny"]), tmp_path)
    other = dataclasses.replace(PRESETS["tiny"], layers=1)
    save_hf(Decoder(other), tmp_path / "other")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(DataError) as error:
        load_hf(tmp_path)
    assert str(error.value) == message("models/llama/decoder:weights_of_another_model", tmp_path / "config.json")
    save_hf(Decoder(dataclasses.replace(PRESETS["tiny"], qkv_bias=True)), tmp_path / "other", overwrite=True)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(DataError) as error:
        load_hf(tmp_path)
    assert "unknown ['model.layers.0.self_attn.k_proj.bias'" in str(error.value) and "(0 and 6 in all)" in str(error.value)


def test_shapes_that_do_not_divide():
    with pytest.raises(ValueError) as error:
        DecoderConfig(64, 128, 2, 6, 2, 256)
    assert str(error.value) == message("models/llama/decoder:shapes_that_do_not_divid")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("hidden", "layers", "heads", "vocabulary", "positions")
            for value in ("a", 2.0, None, True)
        ),
        *((name, value) for name in ("eps", "rope_theta") for value in ("a", None, float("nan"), 0.0, -1.0, True)),
        *(("tied", value) for value in ("yes", 1, None)),
        *(("head_width", value) for value in ("a", 8.0, 0, -8)),
    ],
)
@pytest.mark.parametrize("kind", [DecoderConfig, RichardsConfig])
def test_values_of_another_type_are_refused_by_name(kind, name, value):
    sizes = {"hidden": 16, "intermediate": 24, "layers": 1, "heads": 2, "kv_heads": 1, "vocabulary": 32}
    with pytest.raises(ValueError, match=f"{kind.__name__}: {name}: got {value!r}"):
        kind(**sizes | {name: value})


@pytest.mark.parametrize("kind", [DecoderConfig, RichardsConfig])
@pytest.mark.parametrize(
    "sizes, name", [({}, "hidden"), ({"hidden": "a"}, "hidden"), ({"hidden": 16, "layers": 1}, "intermediate")]
)
def test_a_missing_size_is_refused_by_name(kind, sizes, name):
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: {name}: got .*, wanted a value of type int"):
        kind(**sizes)


@pytest.mark.parametrize("kind, config", [(Decoder, PRESETS["tiny"]), (RichardsDecoder, RichardsConfig(32, 64, 1, 2, 1, 256))])
def test_an_outline_draws_nothing(monkeypatch, kind, config):
    """A normal draw on the meta device imports torch._dynamo: 2 s of each command that reads a folder."""
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, *_: pytest.fail("a draw on the meta device"))
    model = kind(config, device="meta")
    model.classify(["no", "yes"])
    assert all(parameter.is_meta for parameter in model.parameters())


def test_an_embedding_is_torch_s():
    made = []
    for make in (embedding, nn.Embedding):
        torch.manual_seed(0)
        made.append(make(5, 3, dtype=torch.bfloat16).weight)
    assert torch.equal(*made) and made[0].requires_grad
