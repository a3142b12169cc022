"""Published quantised folders: the numbers that every scheme publishes, and what keeps their codes."""

import json
import re
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpubound as gb
from gpubound.data import Tokenizer
from gpubound.errors import DataError
from gpubound.layers.linear_product import format_of
from gpubound.layers.quantized_base import Base, dequantised
from gpubound.models import Decoder, DecoderConfig
from gpubound.models.hf_loading import load_foreign
from gpubound.models.llama.checkpoint import load_hf, reads
from gpubound.models.quantized import gguf
from gpubound.models.quantized.scheme import Coded
from gpubound.models.storing import numbers
from gpubound.trace import fallbacks
from gpubound.train.data import known_tokenizer
from gpubound.train.recipe import Recipe

from .. import wrappers
from .cases import BLOCKS, FORMATS, fp8_rows, gguf_tensor, pack, write, write_gguf

SMALL = DecoderConfig(hidden=256, intermediate=256, layers=1, heads=4, kv_heads=2, vocabulary=64)
WORDS = ["<|end|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "th", "the", "Ġthe", "in", "ing"]
NAMES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def gguf_folder(folder: Path, kinds: dict[str, str], architecture: str = "llama", **rope: Any) -> dict[str, torch.Tensor]:
    """Write a GGUF file alone; return Hugging Face's weights by name, in fp64 those of blocks."""
    model, g = Decoder(SMALL), np.random.default_rng(0)
    numbers: dict[str, torch.Tensor] = {}
    tensors: dict[str, Any] = {}

    def plain(name: str, ours: str, value: torch.Tensor) -> None:
        tensors[name], numbers[ours] = (0, tuple(value.shape), value.detach().numpy().tobytes()), value.detach()

    embedding, blocks = gguf_tensor("Q8_0", g, SMALL.vocabulary, SMALL.hidden)
    tensors["token_embd.weight"], numbers["model.embed_tokens.weight"] = embedding, blocks
    plain("output.weight", "lm_head.weight", model.lm_head.weight)
    plain("output_norm.weight", "model.norm.weight", torch.rand(SMALL.hidden) + 0.5)
    for n in range(SMALL.layers):
        for theirs, ours in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            plain(f"blk.{n}.{theirs}.weight", f"model.layers.{n}.{ours}.weight", torch.rand(SMALL.hidden) + 0.5)
        for short, theirs in NAMES.items():
            part = "self_attn" if short in "qkvo" else "mlp"
            name = f"model.layers.{n}.{part}.{short}_proj"
            tensor, values = gguf_tensor(kinds[short], g, *model.get_submodule(name).weight.shape)
            heads = {"q": SMALL.heads, "k": SMALL.kv_heads}.get(short)
            if heads and architecture in ("llama", "smollm3"):  # row r of half h of a head is at 2 r + h
                width = len(values) // heads
                rows = [head * width + 2 * r + h for head in range(heads) for h in (0, 1) for r in range(width // 2)]
                values = values[rows]
            tensors[f"blk.{n}.{theirs}.weight"], numbers[f"{name}.weight"] = tensor, values
    tokens = WORDS + [f"<{n}>" for n in range(SMALL.vocabulary - len(WORDS))]
    about = {
        "general.architecture": architecture, "block_count": SMALL.layers, "embedding_length": SMALL.hidden,
        "feed_forward_length": SMALL.intermediate, "attention.head_count": SMALL.heads, "context_length": 64,
        "attention.head_count_kv": SMALL.kv_heads, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500.0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1), "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "i n", "in g"],
    }  # fmt: skip
    whole = ("general", "tokenizer")
    about |= {f"rope.{key}": value for key, value in rope.items()}
    metadata = {key if key.startswith(whole) else f"{architecture}.{key}": value for key, value in about.items()}
    write_gguf(folder / "model.gguf", metadata, tensors)
    return numbers


ALL_Q8 = dict.fromkeys(NAMES, "Q8_0")
MIXED = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K", "o": "Q4_K", "gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}


@pytest.mark.parametrize("architecture, kinds", [("llama", MIXED), ("qwen3", ALL_Q8), ("llama", dict.fromkeys(NAMES, "Q4_0"))])
def test_a_gguf_file_alone_is_a_model(tmp_path, architecture, kinds):
    numbers = gguf_folder(tmp_path, kinds, architecture)
    assert reads(tmp_path)
    if architecture == "qwen3":  # whose q_norm and k_norm it lacks
        with pytest.raises(DataError, match="q_norm"):
            load_hf(tmp_path)
        return
    model = load_hf(tmp_path, dtype=torch.float32).eval()
    config = model.config
    assert (config.rope_theta, config.positions, config.tied) == (500.0, 64, False)
    for name, wanted in numbers.items():
        p = model.get_parameter(name)
        values = dequantised([p], torch.float32) if format_of(p).coded else p
        assert torch.equal(values, wanted.float()), name
    kind = BLOCKS[kinds["v"]][3]
    assert format_of(model.get_submodule("model.layers.0.self_attn.v_proj").weight).name == kind
    assert len(gb.decoder(model, max_length=32).generate([[1, 2, 3]], max_new_tokens=4, stop=()).tokens[0]) == 4


def test_heads_of_llamas_kin_are_in_their_own_order(tmp_path):
    transformers = pytest.importorskip("transformers")
    numbers = gguf_folder(tmp_path, ALL_Q8, "smollm3")
    config = transformers.SmolLM3Config(
        hidden_size=SMALL.hidden, intermediate_size=SMALL.intermediate, num_hidden_layers=1, num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads, vocab_size=SMALL.vocabulary, tie_word_embeddings=False, pad_token_id=None,
        bos_token_id=None, eos_token_id=None, architectures=["SmolLM3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    for name in ("q_proj", "k_proj"):
        name = f"model.layers.0.self_attn.{name}.weight"
        assert torch.equal(dequantised([model.get_parameter(name)], torch.float32), numbers[name].float())


def test_a_gguf_file_of_weights_that_were_changed_is_named(tmp_path):
    """llama.cpp adds 1 to the gains of Gemma's norms, whose names are Llama's."""
    transformers = pytest.importorskip("transformers")
    gguf_folder(tmp_path, ALL_Q8, "gemma")
    transformers.GemmaConfig(architectures=["GemmaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="got 'gemma', wanted one of") as error:
        load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key, value", [("scale_linear", 4.0), ("scaling.factor", 4.0), ("dimension_count", 8)])
def test_a_gguf_file_of_other_rotary_angles_is_named(tmp_path, key, value):
    """Files of 2023 name a factor without its kind, which is then linear."""
    gguf_folder(tmp_path, ALL_Q8, **{"dimension_count": SMALL.head_dim, key: value})
    with pytest.raises(DataError, match="its rotary angles are scaled, or of a part of each head"):
        load_hf(tmp_path)


def test_the_tokenizer_of_a_gguf_file(tmp_path):
    gguf_folder(tmp_path, ALL_Q8)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos == 0 and tokenizer.vocab_size == SMALL.vocabulary
    ids = tokenizer.encode("singing the")
    assert [tokenizer.inner.id_to_token(i) for i in ids] == ["s", "ing", "ing", "Ġthe"]
    assert tokenizer.decode(ids) == "singing the"
    assert tokenizer.encode("<|end|>a") == [0, 1]
    known = known_tokenizer(Recipe(model=str(tmp_path)), [])  # a run on this model gets no new one
    assert known is not None and known.fingerprint == tokenizer.fingerprint


def test_a_damaged_gguf_file_is_named(tmp_path):
    gguf_folder(tmp_path, ALL_Q8)
    file = tmp_path / "model.gguf"
    whole = file.read_bytes()
    for size in (3, 30, 2000, len(whole) - 400_000):
        file.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"model\.gguf"):
            load_hf(tmp_path)
    file.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(DataError, match="GGML"):
        load_hf(tmp_path)
    file.write_bytes(whole)
    (tmp_path / "other.gguf").write_bytes(whole)
    with pytest.raises(DataError, match="2 GGUF files"):
        load_hf(tmp_path)


@pytest.mark.parametrize("name", ["gptq-act-order-asymmetric", "fp8-blocks", "nf4"])
def test_a_model_of_transformers_keeps_its_codes(tmp_path, name):
    """Beyond our Decoder, here by the scaling of its rotary angles."""
    pytest.importorskip("transformers")
    numbers = write(tmp_path, name)
    about = json.loads((tmp_path / "config.json").read_text())
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(about | {"rope_parameters": scaling, "rope_scaling": scaling}))
    model = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(isinstance(m, Base) for m in model.modules()) == 14
    twin = type(model)(model.config).eval()
    twin.load_state_dict({key: value.float() for key, value in numbers.items()})
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=1e-5, atol=1e-5)
    gb.place(model, device="cpu")
    torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=1e-5, atol=1e-5)
    decoder = gb.decoder(model, max_length=32)
    assert decoder.path == "", decoder.path
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = twin.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **settings)[0, 4:].tolist()
    assert decoder.generate(ids.tolist(), max_new_tokens=8).tokens == [wanted]


def test_a_tied_model_of_transformers_has_one_embedding(tmp_path):
    pytest.importorskip("transformers")
    numbers = write(tmp_path, "awq")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    about = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(about))
    model = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    assert torch.equal(model.lm_head.weight, numbers["lm_head.weight"]), "a folder that has both"
    del stored["lm_head.weight"]
    save_file(stored, file)
    model = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, numbers["model.embed_tokens.weight"])


def test_a_model_of_images_and_text_has_other_names_than_its_folder(tmp_path):
    pytest.importorskip("transformers")
    model = wrappers.build("mistral3")
    model.save_pretrained(tmp_path)
    file, numbers = tmp_path / "model.safetensors", dict(model.state_dict())
    stored = load_file(file)
    for name in [name for name in stored if name.startswith("language_model") and name.endswith("_proj.weight")]:
        parts, values = fp8_rows(1, *stored.pop(name).shape)
        stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
        numbers[f"model.language_model.{name.removeprefix('language_model.model.')}"] = values.float()
    save_file(stored, file)
    about = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": FORMATS["fp8-rows"][1]}
    (tmp_path / "config.json").write_text(json.dumps(about))
    read = load_foreign(tmp_path, torch.device("cpu"), torch.float32)
    assert sum(isinstance(m, Base) for m in read.modules()) == 8, "attention's: the MLP's have 40 rows or columns"
    model.load_state_dict(numbers)
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"quant_method": "quip"}, "'quip'"),
        ({"quant_method": "gptq", "bits": 3}, "got 3, wanted 4 or 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"\(4, 'gemv'\)"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}}, "nvfp4"),
        (FORMATS["packed"][1] | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ([], r"got \[\], wanted an object"),
    ],
)
def test_an_unknown_quantisation_is_one_sentence(tmp_path, options, said):
    write(tmp_path, "gptq")
    about = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": options}
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match=said) as error:
        load_hf(tmp_path)
    assert "wanted" in str(error.value) and "\n" not in str(error.value)


def test_missing_and_misshapen_parts_are_named(tmp_path):
    write(tmp_path, "fp8-blocks")
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    save_file({key: t for key, t in whole.items() if key != name}, file)
    with pytest.raises(DataError, match="down_proj"):
        load_hf(tmp_path)
    save_file(whole | {name: whole[name][:1].contiguous()}, file)
    with pytest.raises(DataError, match=r"down_proj: got scales \(1, 4\)"):
        load_hf(tmp_path)


def test_a_part_that_changes_a_weight_is_named(tmp_path):
    """ModelOpt's AWQ multiplies what a layer reads; no scheme reads e5m2."""
    write(tmp_path, "awq")
    file, layer = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj"
    whole = load_file(file)
    save_file(whole | {f"{layer}.pre_quant_scale": torch.ones(512)}, file)
    with pytest.raises(DataError, match=f"{layer}.pre_quant_scale"):
        load_hf(tmp_path)
    save_file({key: t for key, t in whole.items() if key != f"{layer}.qzeros"}, file)
    with pytest.raises(DataError, match=f"lacks {layer}.qzeros"):
        load_hf(tmp_path)
    other = tmp_path / "other"
    write(other, "fp8-tensor")
    whole = load_file(other / file.name)
    save_file(whole | {f"{layer}.weight": whole[f"{layer}.weight"].float().to(torch.float8_e5m2)}, other / file.name)
    with pytest.raises(DataError, match="F8_E5M2"):
        load_hf(other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "gptq-act-order-asymmetric"])
def test_reading_holds_the_codes_and_one_layer(tmp_path, name):
    config = DecoderConfig(hidden=256, intermediate=1024, layers=6, heads=4, kv_heads=2, vocabulary=4096)
    write(tmp_path, name, config)
    with Alive() as alive:
        model = load_hf(tmp_path, dtype=torch.bfloat16)
    weights, layer = 6 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 1024 * 256), 1024 * 256
    kept = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    numbers = 4 * 4096 * 256  # of the embedding and the head
    assert kept - numbers < 0.6 * weights, "4.4 bits a weight"
    # A layer's levels are a byte each, and four while they are packed. Of the head nothing is left beside it.
    assert alive.peak < kept + 4.5 * layer
    assert alive.peak - numbers < 2 * weights / 2, "half of the model in 16 bits"


class Alive(TorchDispatchMode):
    """The most bytes that were alive at a time, by the storages of the results of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, tuple[int, list[weakref.ref]]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.tensors.setdefault(storage.data_ptr(), (storage.nbytes(), []))[1].append(weakref.ref(tensor))
        self.tensors = {key: one for key, one in self.tensors.items() if any(ref() is not None for ref in one[1])}
        self.peak = max(self.peak, sum(size for size, _ in self.tensors.values()))
        return result


def projections(model: Decoder) -> dict[str, torch.nn.Linear]:
    return {name: m for name, m in model.named_modules() if name.endswith("_proj")}  # type: ignore[misc]


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_is_read_into_the_numbers_that_it_publishes(tmp_path, name):
    wanted, kind = write(tmp_path, name), FORMATS[name][2]
    model = load_hf(tmp_path, dtype=torch.float32)
    for layer, module in projections(model).items():
        format = format_of(module.weight)
        assert (format.name if format.coded else "") == kind, layer
        values = dequantised([module.weight], torch.float32) if format.coded else module.weight
        # fp32's product of a code and its scale, except NF4's, whose absmax is rounded before
        assert torch.equal(values, wanted[f"{layer}.weight"].float()), layer
    for key in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(model.get_parameter(key), wanted[key])


@pytest.mark.parametrize(
    "groups, said", [([0] * 100 + [1] * 156, "act-order.*different sizes"), ([*range(32)] * 8, "8 columns a scale")]
)
def test_act_orders_that_no_format_holds_are_dequantised(tmp_path, groups, said):
    """Groups of different sizes, and of too few columns. Both are counted, with the reason."""
    write(tmp_path, "gptq-act-order")
    file, layer = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj"
    stored, count, index = load_file(file), max(groups) + 1, torch.tensor(groups, dtype=torch.int32)
    levels = torch.randint(16, (256, 256), generator=torch.Generator().manual_seed(0)).numpy()
    scales = torch.rand(count, 256, generator=torch.Generator().manual_seed(1)).half() / 64
    parts = {"qweight": pack(levels.T, 4).t(), "scales": scales, "qzeros": pack(np.full((count, 256), 7), 4), "g_idx": index}
    save_file(stored | {f"{layer}.{part}": t.contiguous() for part, t in parts.items()}, file)
    before = Counter(fallbacks)
    model = load_hf(tmp_path, dtype=torch.float32)
    ((_, why),) = fallbacks - before
    assert re.fullmatch(f"{layer} are read in float32: .*{said}.*", why), why
    wanted = (torch.from_numpy(levels.T).double() - 8) * scales.double().t()[:, index.long()]
    assert torch.equal(model.get_submodule(layer).weight, wanted.float())


def test_groups_without_an_index_have_the_size_that_the_config_says(tmp_path):
    """The last one may have fewer columns: 96, 96 and 64 are not thirds of 256."""
    write(tmp_path, "gptq")
    about = json.loads((tmp_path / "config.json").read_text())
    about["quantization_config"]["group_size"] = 96
    (tmp_path / "config.json").write_text(json.dumps(about))
    file, layer, g = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj", torch.Generator().manual_seed(0)
    levels, scales = torch.randint(16, (256, 256), generator=g), torch.rand(3, 256, generator=g).half() / 64
    parts = {"qweight": pack(levels.numpy().T, 4).t(), "scales": scales, "qzeros": pack(np.full((3, 256), 7), 4)}
    stored = {name: t for name, t in load_file(file).items() if not name.startswith(layer)}
    save_file(stored | {f"{layer}.{part}": t.contiguous() for part, t in parts.items()}, file)
    wanted = (levels.double() - 8) * scales.double()[torch.arange(256) // 96]
    assert torch.equal(load_hf(tmp_path, dtype=torch.float32).get_submodule(layer).weight, wanted.t().float())


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_a_gguf_file_are_read_into_the_numbers_that_it_publishes(name):
    (kind, shape, raw), wanted = gguf_tensor(name, np.random.default_rng(0), 6, 512)
    blocks = gguf.TYPES[kind]
    assert blocks.name == name
    data = torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).view(6, -1, blocks.nbytes)
    weight = blocks.read(data, 512)
    assert isinstance(weight, Coded) and weight.kind.name == BLOCKS[name][3]
    assert torch.equal(numbers(weight, shape, torch.float32), wanted.float())
