"""Hugging Face folders in and out: config.json and model.safetensors, for the families that the decoder covers.

Every field of a config.json is checked before it is used.
"""

from pathlib import Path
from typing import Any

import torch

from ...data import Tokenizer
from ...errors import DataError
from ...layers.fused_weights import hooked
from ...lora.layers import of_peft
from ..folder import Beyond, ConfigFields, read_config
from ..foreign import needs_transformers
from ..registry import FAMILIES
from ..storing import Weights, read_model, unread_model, write_model
from .decoder import Decoder, DecoderConfig

COMPUTED = ("llama", "mistral", "qwen2", "qwen3")  # what our decoder computes, of the kind's model_types


def load_hf(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Decoder:
    """Load the Decoder in a Hugging Face folder. `dtype` None keeps the one of config.json."""
    return read_model(Path(path), Decoder, config_of, device, dtype)


def unread(path: str | Path) -> Decoder:
    """The same on the meta device, for `read_parts` (storing.py) to fill."""
    return unread_model(Path(path), Decoder, config_of)


def outline(path: str | Path) -> Decoder:
    """The Decoder of a Hugging Face folder on the meta device, without its weights."""
    return Decoder(config_of(read_config(Path(path)), Path(path)), device="meta")


def save_hf(
    model: Decoder,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    weights: Weights | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a folder that transformers loads, with the same logits. A model that is there is replaced only with `overwrite`.

    With `tokenizer` the folder is complete: it also holds the tokenizer, and which tokens begin, end and pad a text.
    """
    config = hf_config(model.config, next(model.parameters()).dtype)
    return write_model(model, config, Path(path), tokenizer, weights, overwrite)


def as_transformers(model: Decoder) -> Any:
    """transformers' module for our decoder, over the same parameters: it computes with the live weights, none is copied."""
    needs_transformers("a decoder without fused kernels")
    from transformers import AutoConfig, AutoModelForCausalLM

    if foreign := of_no_family(model.config):
        raise ValueError(
            f"decoder: model: got a Decoder that transformers cannot compute where the fused kernels do not: {foreign}; set "
            f"one of them off."
        )
    first = next(model.parameters())
    config = AutoConfig.for_model(**hf_config(model.config, first.dtype))
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config, dtype=first.dtype)
    if changed := changed_below(model):
        raise ValueError(
            f"decoder: model: got a Decoder {changed}. Where the fused kernels do not compute it, transformers' "
            f"{type(shell).__name__} does, over its weights, and knows nothing of that; undo it."
        )
    modules = dict(model.named_modules())
    for name, module in list(shell.named_modules()):
        ours = modules.get(name)
        if ours is not None and of_peft(ours):  # the layer itself, with its adapters
            shell.set_submodule(name, ours)
        elif module._parameters:
            module._parameters = modules[name]._parameters
    trunk: Any = shell.model
    trunk.rotary_emb = type(trunk.rotary_emb)(config=config).to(first.device)
    config.max_position_embeddings = 2**31 - 1  # a DecoderConfig's positions are no limit of its code
    return shell.train(model.training)


def changed_below(model: Decoder) -> str | None:
    """What below a decoder is no longer as it was made, and may compute something else than its weights say."""
    modules = dict(model.named_modules())
    for name, made in Decoder(model.config, device="meta").named_modules():
        found = modules.get(name)
        if found is None:
            return f"without {name}"
        base = found.get_base_layer() if of_peft(found) else found  # type: ignore[operator]
        if name and type(base) is not type(made):
            return f"whose {name} is a {type(base).__name__}, not a {type(made).__name__}"
        if name and hooked(found):
            return f"whose {name} carries hooks"
    return None


def config_of(about: dict[str, Any], path: Path) -> DecoderConfig:
    """The decoder's shape from a config.json; what the decoder cannot do is refused by name."""
    fields = ConfigFields(about, path / "config.json")
    family = about.get("model_type")
    if family not in COMPUTED:
        raise Beyond(
            f"{path}: model_type is {family!r}, wanted one of {', '.join(COMPUTED)}; use transformers with gb.place instead."
        )
    rope, scaling = fields.table("rope_parameters"), fields.table("rope_scaling")
    kind = rope.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
    positions, heads = fields.size("max_position_embeddings", largest=2**31), fields.size("num_attention_heads")
    window = about.get("sliding_window") if about.get("use_sliding_window", family == "mistral") else None
    if window is not None:
        fields.size("sliding_window", largest=2**31)
    for name, there in (
        (f"no rope scaling {kind!r}", kind != "default"),
        (f"no hidden_act {about.get('hidden_act')!r}", about.get("hidden_act", "silu") != "silu"),
        ("no sliding window shorter than its positions", window is not None and window < positions),
        ("no bias on o_proj or the MLP", family == "llama" and (about.get("attention_bias") or about.get("mlp_bias"))),
    ):
        if there:
            raise Beyond(f"{path}: the decoder has {name}; use transformers with gb.place, which does.")
    kv_heads = fields.size("num_key_value_heads", heads)
    hidden, head_dim = fields.size("hidden_size"), fields.size("head_dim", 0) or None
    if (heads % kv_heads) or (head_dim is None and hidden % heads) or (head_dim or hidden // heads) % 2:
        raise DataError(
            f"{path / 'config.json'}: got hidden_size {hidden}, num_attention_heads {heads}, num_key_value_heads {kv_heads}, "
            f"head_dim {head_dim}; wanted heads that divide hidden_size, key and value heads that divide the heads, and heads "
            "of an even width."
        )
    return DecoderConfig(
        hidden=hidden,
        intermediate=fields.size("intermediate_size"),
        layers=fields.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        head_width=head_dim,
        rope_theta=fields.number("rope_theta", rope.get("rope_theta", about.get("rope_theta", 10000.0))),
        eps=fields.number("rms_norm_eps", about.get("rms_norm_eps")),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        positions=positions,
    )


def of_no_family(config: DecoderConfig) -> str | None:
    both = config.qkv_bias and config.qk_norm
    return "no Hugging Face family has both q/k/v biases and normed heads" if both else None


def hf_config(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a model of this shape."""
    if foreign := of_no_family(config):
        raise ValueError(f"save_hf: {foreign}; set one of them off.")
    family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    return {
        "architectures": [f"{FAMILIES['llama'][family]}ForCausalLM"],
        "model_type": family,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.positions,
        "rms_norm_eps": config.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
