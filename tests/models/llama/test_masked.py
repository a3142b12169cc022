"""Folders of LLaDA and Dream, written here in the published layout, next to a forward of plain torch from their tensors."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import gpubound as gb
from gpubound.data import Tokenizer, train_tokenizer
from gpubound.decode import MaskedSampler
from gpubound.errors import DataError
from gpubound.models import Decoder, DecoderConfig, load_hf, save_hf
from gpubound.models.language_model import hidden_of

LLADA = {
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
    "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"}, "bias_for_layer_norm": False, "block_group_size": 1,
    "block_type": "llama", "d_model": 32, "embedding_dropout": 0.0, "embedding_size": 304, "eos_token_id": 299,
    "flash_attention": False, "include_bias": False, "include_qkv_bias": False, "init_cutoff_factor": None,
    "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False, "layer_norm_type": "rms",
    "layer_norm_with_affine": True, "mask_token_id": 301, "max_sequence_length": 4096, "mlp_hidden_size": 48,
    "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2,
    "pad_token_id": 299, "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-05, "rope": True,
    "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False, "transformers_version": "4.46.3",
    "use_cache": False, "vocab_size": 304, "weight_tying": False,
}  # fmt: skip
DREAM = {
    "architectures": ["DreamModel"], "attention_dropout": 0.0, "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
    "bos_token_id": 299, "eos_token_id": 299, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
    "intermediate_size": 48, "mask_token_id": 301, "max_position_embeddings": 131072, "max_window_layers": 2,
    "model_type": "Dream", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 299,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.46.2", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 304,
}  # fmt: skip
# (weight, width of its inputs, width of its outputs) of a block; the second is None for norms, and 0 stands for all heads.
LLADA_BLOCK = {
    "attn_norm": (32,), "ff_norm": (32,), "q_proj": (32, 32), "k_proj": (32, 32), "v_proj": (32, 32), "attn_out": (32, 32),
    "ff_proj": (48, 32), "up_proj": (48, 32), "ff_out": (32, 48),
}  # fmt: skip
DREAM_BLOCK = {
    "input_layernorm": (32,), "post_attention_layernorm": (32,), "self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}  # fmt: skip
ENDS = {
    "llada": ("model.transformer.wte", "model.transformer.ln_f", "model.transformer.ff_out", "model.transformer.blocks"),
    "Dream": ("model.embed_tokens", "model.norm", "lm_head", "model.layers"),
}


def write(folder, config, tokenizer=False):
    """Write a folder with random weights; return them."""
    kind = config["model_type"]
    table, norm, head, blocks = ENDS[kind]
    shapes = {f"{table}.weight": (304, 32), f"{norm}.weight": (32,), f"{head}.weight": (304, 32)}
    for n in range(2):
        for name, shape in (LLADA_BLOCK if kind == "llada" else DREAM_BLOCK).items():
            shapes[f"{blocks}.{n}.{name}.weight"] = shape
            if kind == "Dream" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                shapes[f"{blocks}.{n}.{name}.bias"] = shape[:1]
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        plain = train_tokenizer(["def main(): return"] * 4, 299)
        missing = [f"<|reserved_{n}|>" for n in range(plain.vocab_size, 304)]
        plain.inner.add_special_tokens(missing)
        Tokenizer(plain.inner, plain.eos_token).save(folder, overwrite=True)
    return weights


def plain_logits(config, weights, ids):
    """The published forward, written down a second time: pre-norm blocks, every token sees all."""
    llada = config["model_type"] == "llada"
    table, norm, head, blocks = ENDS[config["model_type"]]
    names = LLADA_BLOCK if llada else DREAM_BLOCK
    kv, eps, theta = 4 if llada else 2, config["rms_norm_eps"], config["rope_theta"]
    norm1, norm2, q, k, v, out, gate, up, down = names if not llada else (
        "attn_norm", "ff_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out",
    )  # fmt: skip
    w = {name: t.double() for name, t in weights.items()}

    def rms(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]

    def turned(x):
        angle = torch.arange(x.shape[2]).double()[:, None] * theta ** (-torch.arange(0, 8, 2).double() / 8)
        one, two = x[..., :4], x[..., 4:]
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    x = w[f"{table}.weight"][ids]
    for n in range(2):
        b = f"{blocks}.{n}."
        y = rms(x, b + norm1)
        heads = [linear(y, b + name).unflatten(-1, (-1, 8)).transpose(1, 2) for name in (q, k, v)]
        queries, keys = turned(heads[0]), turned(heads[1]).repeat_interleave(4 // kv, 1)
        scores = (queries @ keys.transpose(-1, -2) / 8**0.5).softmax(-1)
        x = x + linear((scores @ heads[2].repeat_interleave(4 // kv, 1)).transpose(1, 2).flatten(2), b + out)
        y = rms(x, b + norm2)
        x = x + linear(F.silu(linear(y, b + gate)) * linear(y, b + up), b + down)
    return linear(rms(x, norm), head)


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["LLaDA", "Dream"])
def test_a_published_folder_is_loaded_and_written_again(config, tmp_path):
    weights = write(tmp_path / "published", config)
    model = load_hf(tmp_path / "published").eval()
    assert type(model) is Decoder and model.config.causal is False
    ids = torch.randint(304, (2, 9), generator=torch.Generator().manual_seed(1))
    want = plain_logits(config, weights, ids)
    if config is DREAM:  # a token is predicted at the position before it
        want = torch.cat([want[:, :1], want[:, :-1]], 1)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).double(), want, rtol=1e-3, atol=1e-3)
        assert torch.equal(model.lm_head(hidden_of(model, {"input_ids": ids})), model(ids))
    save_hf(model, tmp_path / "again")
    again, about = load_file(tmp_path / "again" / "model.safetensors"), json.loads((tmp_path / "again/config.json").read_text())
    assert again.keys() == weights.keys() and all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    common = about.keys() & config.keys()
    assert len(common) > 12 and all(about[name] == config[name] for name in common if about[name] is not None)
    assert load_hf(tmp_path / "again").config == model.config


def test_the_dtype_of_llada_is_that_of_its_tensors(tmp_path):
    """Its config names none."""
    weights = write(tmp_path, LLADA)
    save_file({name: t.bfloat16() for name, t in weights.items()}, tmp_path / "model.safetensors")
    assert load_hf(tmp_path).lm_head.weight.dtype is torch.bfloat16
    assert load_hf(tmp_path, dtype=torch.float32).lm_head.weight.dtype is torch.float32


def test_its_mask_token_is_found(tmp_path):
    """LLaDA's tokenizer has the token, and only config.json names it."""
    write(tmp_path, LLADA, tokenizer=True)
    model, tokenizer = load_hf(tmp_path).eval(), Tokenizer.load(tmp_path)
    assert tokenizer.mask == 301 and MaskedSampler(model, tokenizer).mask_token == MaskedSampler(model).mask_token == 301
    answer = MaskedSampler(model).generate([[1, 2, 3]], 6, steps=3).tokens[0]
    assert len(answer) == 6 and 301 not in answer
    with pytest.raises(ValueError, match="causal=False"):
        gb.decoder(model)


@pytest.mark.parametrize(
    "config, change, named",
    [
        (LLADA, {"block_type": "sequential"}, "block_type: got 'sequential'"),
        (LLADA, {"include_bias": None}, "include_bias: got None"),
        (LLADA, {"attention_layer_norm": True}, "attention_layer_norm: got True"),
        (LLADA, {"clip_qkv": 8.0}, "clip_qkv: got 8.0"),
        (LLADA, {"sparse_attention": True}, "sparse_attention: got True"),
        (LLADA, {"mask_token_id": 304}, "mask_token_id: got 304"),
        (LLADA, {"n_heads": 5}, "hidden 32"),
        (DREAM, {"architectures": ["DreamForCausalLM"]}, "architectures: got"),
        (DREAM, {"use_mrope": True}, "use_mrope: got True"),
        (DREAM, {"rope_scaling": {"type": "yarn"}}, "rope_scaling: got"),
        (DREAM, {"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_config_that_computes_something_else_is_refused(config, change, named, tmp_path):
    write(tmp_path, config | change)
    with pytest.raises(DataError, match=named):
        load_hf(tmp_path)


def test_refused_options():
    sizes = {"hidden": 32, "intermediate": 48, "layers": 1, "heads": 4, "kv_heads": 2, "vocabulary": 64}
    with pytest.raises(ValueError, match="shifted: got True"):
        DecoderConfig(**sizes, shifted=True)
    with pytest.raises(ValueError, match="shifted: got True"):
        gb.RichardsConfig(**sizes, causal=False, shifted=True)
    with pytest.raises(ValueError, match="qk_norm"):
        save_hf(Decoder(DecoderConfig(**sizes, causal=False, qk_norm=True)), "nowhere")
