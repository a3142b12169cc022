"""Folders of DeepSeek-V4 in fp8 and fp4: their numbers beside transformers' own, another block size, sentences."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

import gpubound as gb
from gpubound import trace
from gpubound.errors import DataError
from gpubound.kernels.packed_weights import E2M1, unpack
from gpubound.layers.quantized_base import numbers_of
from gpubound.models.deepseek_v4 import checkpoint
from gpubound.models.deepseek_v4.checkpoint import load_coded, numbers
from gpubound.models.deepseek_v4.family import keep_in_fp32, rounded
from gpubound.models.hf_loading import load_foreign
from tests.messages import message

from .decode.cases import build, own_logits, text

CPU = torch.device("cpu")
BLOCK = 8
DENSE = re.compile(r".*\.(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123])\.weight")
E8M0 = torch.float8_e8m0fnu


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale for each block, the power of two above its greatest over 448."""
    tiles = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax((1, 3)) / 448)))
    return (tiles / scale[:, None, :, None]).flatten(0, 1).flatten(1).to(torch.float8_e4m3fn), scale.to(E8M0)


def in_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(2) / 6)))
    levels = torch.tensor([*E2M1, *(-x for x in E2M1)])
    codes = ((groups / scale[..., None])[..., None] - levels).abs().argmin(-1).flatten(1).to(torch.uint8)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), scale.to(E8M0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What transformers writes of a tiny model, its matrices coded as in the published files, one of them in a second file."""
    path = tmp_path_factory.mktemp("coded")
    build(moe_intermediate_size=32).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in list(tensors):
        coded = in_fp4 if ".ffn.experts." in name else in_fp8 if DENSE.fullmatch(name) and "compressor" not in name else None
        if coded is not None:
            tensors[name], tensors[name.removesuffix("weight") + "scale"] = coded(tensors[name])
    tensors["mtp.0.norm.weight"] = torch.ones(32)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    about = json.loads((path / "config.json").read_text())
    about["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(about))
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    config = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), scale_fmt="ue8m0", expert_dtype="fp4", dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config).eval()


@pytest.mark.slow
def test_numbers_are_transformers_own_and_are_decoded(folder, theirs):
    before = sum(trace.fallbacks.values())
    model = load_foreign(folder, CPU, torch.float32)
    row = next(key for key in trace.fallbacks if key[0].startswith(f"weights of {folder.name}"))
    assert row[0].endswith("25 in fp8, 54 in fp4") and sum(trace.fallbacks.values()) == before + 1
    assert row[1] == message("models/deepseek_v4/checkpoint:numbers_are_transformers")
    ids = text(40)
    torch.testing.assert_close(own_logits(model, ids), own_logits(theirs, ids), rtol=0, atol=1e-6)
    assert (own_logits(model, ids) - own_logits(build(moe_intermediate_size=32), ids)).abs().max() > 1e-2  # codes round
    found = gb.decoder(model, 1, 64, verify=False).generate([ids[:9].tolist()], max_new_tokens=9, stop=()).tokens[0]
    assert found == theirs.generate(ids[None, :9], max_new_tokens=9, do_sample=False)[0, 9:].tolist()


@pytest.mark.slow
def test_experts_that_stay_in_fp4_are_decoded_to_the_same_tokens(folder, theirs, said):
    """By the model's own forward, prompts of any length, and steps; the judge listens to all of them."""
    model = load_coded(folder, CPU, torch.float32, codes=True)
    told = said()
    assert message("models/deepseek_v4/checkpoint:experts_that_stay_in_fp4").within(told) and "fallback" not in told
    assert not any(".experts." in name for name, _ in model.named_parameters())
    assert numbers_of(model) == numbers_of(theirs) == sum(p.numel() for p in theirs.parameters())
    held = sum(t.nbytes for name, t in model.named_buffers() if ".experts." in name)
    assert held == 3 * 6 * (2 * 32 + 32) * (64 + 4), "each row is one group of 128 columns: 64 bytes, and four scales"
    ids = text(40)
    torch.testing.assert_close(own_logits(model, ids), own_logits(theirs, ids), rtol=0, atol=1e-6)
    fast = gb.decoder(model, 2, 64)
    rows = [row for row in str(fast).splitlines() if "experts" in row]
    assert "quantized_routed_gate_up, quantized_routed_down" in rows[0] and message(
        "models/deepseek_v4/checkpoint:experts_that_stay_in_fp4.2"
    ).within(rows[1])
    prompts = [ids[:9].tolist(), ids[:23].tolist()]
    for prompt, found in zip(prompts, fast.generate(prompts, max_new_tokens=8, stop=()).tokens):
        wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
        assert found == wanted.tolist()


def test_codes_wait_in_the_hosts_memory_for_the_gpus_that_read_them(folder, theirs, monkeypatch, said):
    """Which slices are cut from it."""
    monkeypatch.setattr(checkpoint, "has_cores", lambda device: device.type == "cuda")
    model = load_coded(folder, CPU, torch.float32, computes=torch.device("cuda", 0))
    assert "fallback" not in said() and {t.device for t in model.buffers()} == {CPU}
    kept = load_coded(folder, CPU, torch.float32, codes=True).state_dict()
    assert kept.keys() == model.state_dict().keys() and all(torch.equal(t, kept[n]) for n, t in model.state_dict().items())
    load_coded(folder, CPU, torch.float32, computes=CPU)
    assert message("models/deepseek_v4/checkpoint:codes_wait_in_the_hosts").within(said())


def test_in_16_bits_norms_stay_in_fp32(folder):
    """As transformers keeps them: activations have the weights' dtype, whatever the norms' is."""
    model = load_coded(folder, CPU, torch.bfloat16, codes=True)
    layer = model.model.layers[0]
    assert layer.post_attention_layernorm.weight.dtype == torch.float32 and layer.mlp.gate.weight.dtype == torch.bfloat16
    assert gb.decoder(model, 1, 64, verify=False).generate([text(9).tolist()], max_new_tokens=2, stop=()).count == 2


@pytest.mark.gpu
def test_on_a_gpu_experts_stay_in_fp4(folder):
    """Captured, beside the same numbers in fp32; and in bf16 to the end."""
    gpu = torch.device("cuda", 0)
    coded, plain = load_foreign(folder, gpu, torch.float32), load_coded(folder, gpu, torch.float32, codes=False)
    assert coded.model.layers[0].mlp.experts.packed("down").words.is_cuda
    prompts = [text(9).tolist(), text(23).tolist()]
    found, wanted = (gb.decoder(model, 2, 64).generate(prompts, max_new_tokens=24, stop=()) for model in (coded, plain))
    assert found.tokens == wanted.tokens
    fast = gb.decoder(load_foreign(folder, gpu, torch.bfloat16), 2, 64)
    assert fast.generate(prompts, max_new_tokens=24, stop=()).count == 48 and "quantized_routed_down" in str(fast)


def test_transformers_own_names(folder, tmp_path):
    """The same numbers of a file that names its tensors as the model does, experts stacked."""
    model = load_foreign(folder, CPU, torch.float32)
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    for name in [name for name in tensors if ".mlp.experts." in name]:
        coded = [in_fp4(expert) for expert in tensors[name]]
        tensors[name], tensors[f"{name}_scale_inv"] = (torch.stack(list(t)) for t in zip(*coded))
    name = "model.layers.0.self_attn.q_a_proj.weight"
    tensors[name], tensors[f"{name}_scale_inv"] = in_fp8(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    found = load_foreign(tmp_path, CPU, torch.float32).state_dict()
    for name, want in model.state_dict().items():
        torch.testing.assert_close(found[name], want, rtol=0, atol=0)  # powers of two: coded once more, the same numbers
    kept = load_coded(tmp_path, CPU, torch.float32, codes=True).model.layers[1].mlp.experts
    for part in ("gate_up", "down"):
        want = model.model.layers[1].mlp.experts.get_parameter(f"{part}_proj")
        torch.testing.assert_close(unpack(kept.packed(part)).view_as(want), want.data, rtol=0, atol=0)


def test_blocks_that_end_behind_a_matrix():
    """576 rows in blocks of 128, as published; every byte of fp4; e8m0 as bytes."""
    codes = torch.ones(5, 7).to(torch.float8_e4m3fn)
    scales = torch.arange(6.0).view(3, 2)
    want = scales.repeat_interleave(2, 0)[:5].repeat_interleave(4, 1)[:, :7]
    torch.testing.assert_close(numbers(codes, scales, (2, 4)), want, rtol=0, atol=0)
    halves = torch.arange(256, dtype=torch.uint8).view(16, 16)
    found = numbers(halves.view(torch.int8), torch.full((16, 1), 128, dtype=torch.uint8), (2, 4))
    table = torch.tensor([*E2M1, *(-x for x in E2M1)]) * 2
    torch.testing.assert_close(found[:, 1::2], table[:, None].expand(16, 16), rtol=0, atol=0)
    torch.testing.assert_close(found[:, ::2], table.expand(16, 16), rtol=0, atol=0)


def test_a_folder_that_is_not_whole(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())

    def said(**changed: torch.Tensor | None) -> str:
        whole = {name: t for name, t in (tensors | changed).items() if t is not None}
        save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(DataError) as error:
            load_foreign(tmp_path, CPU)
        return str(error.value)

    name = "model.layers.1.attn.wkv.weight"
    lacking = said(**{name: None, "model.layers.1.attn.wkv.scale": None})
    assert lacking == message("models/deepseek_v4/checkpoint:a_folder_that_is_not_who", tmp_path)
    assert said(**{"model.layers.1.attn.wkv.scale": torch.ones(2, 3)}) == (
        message("models/deepseek_v4/checkpoint:a_folder_that_is_not_who.2", name)
    )
    assert said(**{"model.norm.weight": torch.ones(31)}) == (
        message("models/deepseek_v4/checkpoint:a_folder_that_is_not_who.3", tmp_path)
    )


def test_layers_that_stay_in_fp8(folder):
    """They keep their bytes whatever the model is cast to, are copied with it, and a hook on one is not passed over."""
    model = load_coded(folder, CPU, torch.float32, codes=True)
    layer = model.model.layers[0].self_attn.q_a_proj
    before, blocks = layer(torch.ones(1, 32)), layer.blocks
    model.to(torch.bfloat16)
    assert torch.equal(layer.blocks.codes.view(torch.uint8), blocks.codes.view(torch.uint8)) and layer.blocks.scale.equal(
        blocks.scale
    )
    assert layer.blocks.dtype == torch.bfloat16 and layer(torch.ones(1, 32)).equal(before)
    model.float()
    assert copy.deepcopy(model).model.layers[0].self_attn.q_a_proj(torch.ones(1, 32)).equal(before)
    with pytest.raises(DataError, check=message("models/deepseek_v4/checkpoint:layers_that_stay_in_fp8")):
        copy.deepcopy(model).save_pretrained(folder)
    layer.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.q_a_proj"):
        gb.decoder(model, 1, 64)


def test_a_step_says_which_weights_stay_in_codes(folder):
    """All else trains. Where adapters alone train, nobody thinks that the codes do."""
    model = load_coded(folder, CPU, torch.float32, codes=True)
    row = (
        "train: weights in codes",
        "those of model.layers.0.self_attn.q_a_proj and 27 more layers are no parameters, so they stay as they are and the "
        "rest of the model trains; to train all of it, load it with codes=False",
    )
    before = trace.fallbacks[row]
    gb.TrainStep(model, "causal_lm", precision="fp32").close()
    assert trace.fallbacks.pop(row) == before + 1
    gb.lora.add(model.requires_grad_(False), rank=2, targets=["compressor.kv_proj"])
    gb.TrainStep(model, "causal_lm", precision="fp32").close()
    assert row not in trace.fallbacks


def test_all_linear_says_which_layers_get_no_adapter(folder):
    model = load_coded(folder, CPU, torch.float32, codes=True)
    row = (
        "lora.add: all-linear",
        "the weights of model.layers.0.self_attn.q_a_proj and 24 more linear layers are quantised and no parameters: no "
        "adapter for them",
    )
    before = trace.fallbacks[row]
    gb.lora.add(model, rank=2)
    assert trace.fallbacks.pop(row) == before + 1


def test_scales_of_another_size(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("wq_a.scale"))
    tensors[name] = tensors[name].view(torch.uint8)[:1].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(DataError, check=message("models/deepseek_v4/checkpoint:scales_of_another_size")):
        load_coded(tmp_path, CPU, torch.float32, codes=True)


def changed(folder, path, config=None, **tensors):
    """The folder with other tensors; None takes one out."""
    whole = {name: t for name, t in (load_file(folder / "model.safetensors") | tensors).items() if t is not None}
    save_file(whole, path / "model.safetensors", {"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    about["quantization_config"] |= config or {}
    (path / "config.json").write_text(json.dumps(about))
    return path


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(("of", "dtype"), [("attn.wo_b", "float8_e4m3fn"), ("ffn.experts.0.w1", "int8")])
def test_codes_without_scales_are_no_numbers(of, dtype, codes, folder, tmp_path):
    """Those in fp8 were read as they stand, without a word."""
    name = f"model.layers.1.{of}"
    with pytest.raises(DataError) as error:
        load_coded(changed(folder, tmp_path, **{f"{name}.scale": None}), CPU, torch.float32, codes=codes)
    assert str(error.value) == message("models/deepseek_v4/checkpoint:codes_without_scales_are", tmp_path, name, dtype)


@pytest.mark.parametrize("codes", [False, True])
def test_scales_that_are_integers(codes, folder, tmp_path):
    """Bytes with a sign would be read as the numbers that they spell, not as powers of two."""
    name = "model.layers.1.attn.wkv.scale"
    signed = load_file(folder / "model.safetensors")[name].view(torch.int8)
    with pytest.raises(DataError) as error:
        load_coded(changed(folder, tmp_path, **{name: signed}), CPU, torch.float32, codes=codes)
    assert str(error.value) == message("models/deepseek_v4/checkpoint:scales_that_are_integers", tmp_path, name)


def test_experts_whose_scales_are_no_powers_of_two_become_numbers(folder, tmp_path, said):
    """Where codes are to stay, too: kernels read no other scales."""
    tensors = load_file(folder / "model.safetensors")
    scales = {name: t.float() * 1.5 for name, t in tensors.items() if ".experts." in name and name.endswith("scale")}
    model = load_coded(changed(folder, tmp_path, **scales), CPU, torch.float32, codes=True)
    assert "54 in fp4" in said() and hasattr(model.model.layers[0].mlp.experts, "down_proj")
    plain = load_coded(folder, CPU, torch.float32, codes=False)
    own, other = (m.model.layers[1].mlp.experts.down_proj for m in (model, plain))
    torch.testing.assert_close(own, other * 1.5, rtol=0, atol=0)


@pytest.mark.parametrize("size", [[8], [8, 0], [8, 8, 8], [8.0, 8.0], "88", 8])
def test_a_size_of_blocks_that_is_none(size, folder, tmp_path):
    with pytest.raises(DataError) as error:
        load_foreign(changed(folder, tmp_path, {"weight_block_size": size}), CPU)
    assert str(error.value) == message("models/deepseek_v4/checkpoint:a_size_of_blocks_that_is", tmp_path, repr(size))


@pytest.mark.slow
@pytest.mark.parametrize("codes", [False, True])
def test_layers_dealt_out_to_several_devices(folder, codes):
    """Made without memory first: what no file holds is there, too, and the tokens are the same."""
    whole, dealt = (load_coded(folder, where, torch.float32, codes=codes) for where in (CPU, [CPU, CPU]))
    for kind in ("named_parameters", "named_buffers"):
        wanted, found = dict(getattr(whole, kind)()), dict(getattr(dealt, kind)())
        assert wanted.keys() == found.keys() and all(found[name].equal(t) for name, t in wanted.items())
    with pytest.raises(ValueError, check=message("models/deepseek_v4/checkpoint:layers_dealt_out_to_seve")):
        load_coded(folder, [])
    prompts = [text(9).tolist(), text(23).tolist()]
    tokens = gb.decoder(dealt, 2, 64, devices=["cpu", "cpu"], verify=False).generate(prompts, max_new_tokens=5, stop=()).tokens
    assert tokens == gb.decoder(whole, 2, 64, verify=False).generate(prompts, max_new_tokens=5, stop=()).tokens


@pytest.fixture
def older(monkeypatch):
    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)

    monkeypatch.setattr(DeepseekV4RMSNorm, "forward", forward)


@pytest.mark.slow
def test_an_older_transformers_norm(older):
    model = build().bfloat16()
    for name, parameter in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    ids = text(9)[None]
    with pytest.raises(RuntimeError, match="same dtype"):
        model(input_ids=ids)
    assert gb.decoder(model, 1, 64).generate(ids.tolist(), max_new_tokens=2, stop=()).count == 2
    with pytest.raises(RuntimeError, match="same dtype"):  # which leaves the model as it was
        model(input_ids=ids)
    keep_in_fp32(model)
    assert model(input_ids=ids).logits.isfinite().all() and not rounded(model)


def test_norms_that_round_have_no_hook():
    model = build()
    assert not rounded(model)
    keep_in_fp32(model)
    assert not any(module._forward_hooks for module in model.modules())
