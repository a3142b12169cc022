"""Decoding of models whose own weights are quantised: the tokens of their numbers, by the kernels that read their codes."""

import copy
from dataclasses import replace

import pytest
import torch

import gpubound as gb
from gpubound.errors import GenerateError
from gpubound.layers.quantized_base import KINDS, Base, InPacked
from gpubound.lora.base import dequantize_base, quantize_base
from gpubound.models import Decoder, DecoderConfig
from gpubound.models.hf_loading import load_foreign
from gpubound.models.llama.checkpoint import as_transformers, load_hf
from tests.kernels.test_quantized_product import weight
from tests.models.quantized import test_mxfp4 as mxfp4
from tests.models.quantized.cases import CONFIG, write

from .cases import build, prompts

INTERPRETED = replace(CONFIG, hidden=128, intermediate=256, layers=1)  # two groups of codes in a row of the down product
HELD = ("gptq", "gptq-act-order", "packed-act-order", "awq", "packed-asymmetric", "int8-rows", "fp8-rows", "fp8-blocks", "nf4")
STEP = [
    ("2 x norm, q k v", "quantized_norm_product"),
    ("2 x output", "quantized_add_product"),
    ("2 x norm, gate, up", "quantized_norm_gate_up"),
]


def dense(model: Decoder) -> Decoder:
    twin = copy.deepcopy(model)
    dequantize_base(twin)
    return twin


def greedy(model: Decoder, ids: list[list[int]], count: int) -> list[list[int]]:
    """transformers' tokens."""
    theirs, found = as_transformers(dense(model)), []
    for prompt in ids:
        ids_BT = torch.tensor([prompt], device=theirs.device)
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = theirs.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=count, **settings)
        found.append(out[0, len(prompt) :].tolist())
    return found


def assert_greedy(model: Decoder, rows: int = 2, count: int = 8, **options) -> gb.FastDecoder:
    """Compare the tokens of the kernels that read codes with those of the dequantised weights. Return the decoder."""
    decoder = gb.decoder(model, rows, 64, **options)
    assert decoder.path == "", decoder.path
    texts = prompts(*range(3, 3 + rows))
    wanted = gb.decoder(dense(model), rows, 64, verify=False).generate(texts, max_new_tokens=count).tokens
    assert decoder.generate(texts, max_new_tokens=count).tokens == wanted
    return decoder


def with_codes(kinds: dict[str, str], device: torch.device, config: DecoderConfig = CONFIG) -> Decoder:
    """A Decoder of random weights in fp32, whose layers of these names have random codes of these kinds."""
    torch.manual_seed(0)
    model = Decoder(config, device=device)
    for seed, (name, layer) in enumerate(model.named_modules()):
        if (kind := kinds.get(name.rpartition(".")[2])) is not None:
            packed = weight(device, kind, *layer.weight.shape, seed)
            packed = packed._replace(scale=packed.scale / 64, extra=None if packed.extra is None else packed.extra / 64)
            layer.weight = torch.nn.Parameter(torch.empty(layer.weight.shape, device="meta"))
            Base(layer, KINDS[kind], InPacked.split(packed), torch.float32)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_tokens_are_those_of_transformers_over_the_dequantised_folder(tmp_path, name):
    write(tmp_path, name)
    model = load_hf(tmp_path, dtype=torch.float32).eval()
    texts = prompts(1, 19, 6)
    decoder = gb.decoder(model, max_batch=4, max_length=64)
    table = repr(decoder)
    assert all(what in table and op in table for what, op in STEP), table
    assert decoder.generate(texts, max_new_tokens=12).tokens == greedy(model, texts, 12)
    codes = sum(t.nbytes for m in model.modules() if isinstance(m, Base) for t in (m._weight, *m.buffers()))
    assert decoder.body.weight_bytes < 1.1 * codes + sum(p.nbytes for p in model.parameters() if p.is_floating_point())


@pytest.mark.parametrize("rows", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_layers_of_several_formats_are_a_product_each(device, rows):
    model = with_codes(
        {"q_proj": "uint4_32", "k_proj": "uint4_32", "v_proj": "int8_16", "gate_proj": "uint4", "up_proj": "uint4",
         "down_proj": "int8_16", "o_proj": "int4_32"}, device,
    )  # fmt: skip
    texts = prompts(*range(2, 2 + rows))
    assert gb.decoder(model, rows, 64).generate(texts, max_new_tokens=8).tokens == greedy(model, texts, 8)


@pytest.mark.slow
def test_a_base_that_is_quantised_for_training_is_decoded_by_its_codes(device):
    for kind in ("nf4", "int8", "fp8"):
        torch.manual_seed(0)
        model = Decoder(CONFIG, device=device).eval()
        quantize_base(model, kind)
        assert_greedy(model, verify=kind == "nf4")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Phi3", "Glm4", "Gemma3", "Qwen2", "Lfm2", "Qwen3_5", "Bamba", "FalconH1"])
def test_families_are_decoded_by_their_codes(device, family):
    """Also projections that are slices of one weight, biases, norms with an offset and other activations."""
    model = build(family, device=device)
    quantize_base(model, "int8")
    for rows in (2, 12):
        assert "quantized_norm_gate_up" in repr(assert_greedy(model, rows, verify=rows == 12))


@pytest.mark.slow
def test_adapters_are_added_to_the_products_of_codes(device):
    torch.manual_seed(0)
    model = Decoder(CONFIG, device=device).eval()
    quantize_base(model, "int8")
    gb.lora.add(model, rank=4, alpha=64)
    for p in gb.lora.parameters(model):
        torch.nn.init.normal_(p, std=0.1)
    for rows in (1, 3, 12):
        assert_greedy(model, rows, verify=rows == 12)


def test_biases_that_change_in_place_are_followed(device):
    model = build("Qwen2", device=device)
    quantize_base(model, "int8")
    decoder = gb.decoder(model, 1, 16, verify=False)
    decoder.generate(texts := prompts(3), max_new_tokens=2)
    with torch.no_grad():
        for bias in (p for name, p in model.named_parameters() if name.endswith("proj.bias")):
            bias.normal_(std=3.0)
    wanted = gb.decoder(dense(model), 1, 16, verify=False).generate(texts, max_new_tokens=2).tokens
    reads = decoder.body.taken
    assert decoder.generate(texts, max_new_tokens=2).tokens == wanted
    assert decoder.body.taken == reads, "graphs stay: nothing is read anew"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uint4", "fp8_blocks", "nf4"])
def test_the_kernels_give_the_same_tokens(interpret, kind):
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    model = with_codes(dict.fromkeys(names, kind), torch.device("cpu"), INTERPRETED)
    wanted = greedy(model, texts := prompts(5), 2)
    interpret()
    assert gb.decoder(model, 1, 32, verify=False).generate(texts, max_new_tokens=2).tokens == wanted


@pytest.mark.slow
def test_the_kernels_give_the_same_tokens_of_experts_in_mxfp4(interpret, tmp_path):
    twin = mxfp4.write(tmp_path)
    model = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    wanted = mxfp4.greedy(twin, texts := prompts(5), 2)
    interpret()
    decoder = gb.decoder(model, 1, 32, verify=False)
    assert decoder.generate(texts, max_new_tokens=2, stop=()).tokens == wanted
    assert ("2 x down of experts", "triton: quantized_column_down, add_slots", "") in decoder.body.report()


def test_rounding_what_is_quantised_is_refused(device):
    model = with_codes(dict.fromkeys(("q_proj", "k_proj", "v_proj"), "int8_16"), device)
    with pytest.raises(GenerateError, match="quantised already"):
        gb.decoder(model, max_length=32, weights="int4")


@pytest.mark.parametrize("adapted", [False, True])
def test_gate_and_up_of_two_formats_are_a_product_each(device, adapted):
    model = with_codes({"gate_proj": "uint4", "up_proj": "int8_16"}, device)
    if adapted:
        gb.lora.add(model, rank=4, targets=["gate_proj", "up_proj"])
        for p in gb.lora.parameters(model):
            torch.nn.init.normal_(p, std=0.1)
    decoder = assert_greedy(model)
    (kernels,) = (kernels for product, kernels, _ in decoder.body.report() if product == "2 x norm, gate, up")
    assert kernels.endswith(": quantized_norm_product")  # not of both


@pytest.mark.slow
def test_columns_that_each_layer_sorts_in_another_order(tmp_path, device):
    """q, k and v, and gate and up, are a product each. A copy and a state dict keep the order."""
    write(tmp_path, "gptq-8-act-orders")
    model = load_hf(tmp_path, dtype=torch.float32).eval().to(device)
    attention = model.model.layers[0].self_attn
    assert not torch.equal(attention.q_proj.base.buffer("order"), attention.k_proj.base.buffer("order"))
    for rows in (3, 12):
        decoder = gb.decoder(model, rows, 64, verify=rows == 3)
        assert decoder.path == ""
        assert decoder.generate(texts := prompts(*range(2, 2 + rows)), max_new_tokens=8).tokens == greedy(model, texts, 8)
    other = load_hf(tmp_path, dtype=torch.float32).to(device)
    for module in other.modules():
        if isinstance(module, Base):
            module.buffer("order").zero_()
    other.load_state_dict(model.state_dict())
    for one in (other, copy.deepcopy(model)):
        assert torch.equal(dense(one).model.layers[1].mlp.down_proj.weight, dense(model).model.layers[1].mlp.down_proj.weight)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq-act-order", "gptq-8-act-orders"])
def test_the_kernels_give_the_same_tokens_of_sorted_columns(interpret, tmp_path, name):
    write(tmp_path, name, INTERPRETED)
    model = load_hf(tmp_path, dtype=torch.float32).eval()
    wanted = greedy(model, texts := prompts(5), 2)
    interpret()
    assert gb.decoder(model, 1, 32, verify=False).generate(texts, max_new_tokens=2).tokens == wanted
