"""Hugging Face folders in and out: config.json and model.safetensors, for the families that the decoder covers.

Every field of a config.json is checked before it is used.
"""

import json
import os
from pathlib import Path
from stat import S_IMODE
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...corpus import Tokenizer
from ...corpus.tokenizer import ends_of_turn
from ...errors import DataError
from ...files import write_whole, writing
from ...lora.merge import plain_state
from ..folder import (
    GENERATION,
    INDEX,
    SPECIAL_IDS,
    WEIGHTS,
    Beyond,
    ConfigFields,
    Stored,
    check_layers,
    dtype_of,
    ends_of,
    opened,
    read_config,
    read_generation,
    stored_tensors,
)
from ..foreign import needs_transformers
from ..registry import FAMILIES
from .decoder import Decoder, DecoderConfig

COMPUTED = ("llama", "mistral", "qwen2", "qwen3")  # what our decoder computes, of the kind's model_types
BUFFERS = "rotary_emb.inv_freq"  # old checkpoints hold it beside the weights; it follows from the config
FLOATS = ("F64", "F32", "F16", "BF16")


def load_hf(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Decoder:
    """Load the Decoder in a Hugging Face folder. `dtype` None keeps the one of config.json."""
    path = Path(path)
    about = read_config(path)
    config, stored = config_of(about, path), stored_tensors(path)
    generation = read_generation(path, about)
    _check(path, config, stored)
    model = Decoder(config, device=device, dtype=dtype or dtype_of(about, path))
    model.generation, model.name_or_path = generation, str(path.resolve())  # found from anywhere
    wanted = model.state_dict()
    if config.tied:
        del wanted["lm_head.weight"]  # the same tensor as the embedding
    for file in {tensor.file for tensor in stored.values()}:
        with opened(file) as tensors, torch.no_grad():
            for name in (name for name, tensor in stored.items() if tensor.file == file and name in wanted):
                wanted[name].copy_(tensors.get_tensor(name))
    return model


def outline(path: str | Path) -> Decoder:
    """The Decoder of a Hugging Face folder on the meta device, without its weights."""
    return Decoder(config_of(read_config(Path(path)), Path(path)), device="meta")


def save_hf(model: Decoder, path: str | Path, tokenizer: Tokenizer | None = None) -> Path:
    """Write a folder that transformers loads, with the same logits. A model that is already there is replaced.

    With `tokenizer` the folder is complete: it also holds the tokenizer, and which tokens begin, end and pad a text.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().contiguous().cpu() for name, t in plain_state(model).items()}
    if model.config.tied:
        del tensors["lm_head.weight"]
    generation = dict(model.generation) | (special_ids(model, tokenizer) if tokenizer else {})
    # Where config.json is silent, transformers takes bos = 1 and eos = 2, whatever those tokens are.
    config = hf_config(model.config, next(model.parameters()).dtype) | {name: generation.get(name) for name in SPECIAL_IDS}
    _write_tensors(tensors, path / WEIGHTS)
    (path / INDEX).unlink(missing_ok=True)  # of a model in several files; it would name those instead of what was just written
    for name, content in (("config.json", config), (GENERATION, generation)):
        write_whole(path / name, json.dumps(content, indent=2) + "\n")
    if tokenizer:
        tokenizer.save(path)
    return path


def as_transformers(model: Decoder) -> Any:
    """transformers' module for our decoder, over the same parameters: it computes with the live weights, none is copied."""
    needs_transformers("a decoder without fused kernels")
    from transformers import AutoConfig, AutoModelForCausalLM

    first = next(model.parameters())
    config = AutoConfig.for_model(**hf_config(model.config, first.dtype))
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config, dtype=first.dtype)
    for name, module in shell.named_modules():
        if module._parameters:
            module._parameters = model.get_submodule(name)._parameters
    trunk: Any = shell.model
    trunk.rotary_emb = type(trunk.rotary_emb)(config=config).to(first.device)
    return shell.train(model.training)


def special_ids(model: Decoder, tokenizer: Tokenizer) -> dict[str, Any]:
    """The special tokens by number, as generation_config.json names them: all that end a text or a turn of a chat."""
    ends = ends_of(model.generation)
    ends = [*([] if tokenizer.eos is None else [tokenizer.eos]), *ends_of_turn(tokenizer), *ends]
    ends = [end for end in dict.fromkeys(ends) if end < model.config.vocabulary]
    found = {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    for name in ("bos", "pad"):
        token = tokenizer.special.get(f"{name}_token")
        found[f"{name}_token_id"] = None if token is None else tokenizer.inner.token_to_id(token)
    return found


def _check(path: Path, config: DecoderConfig, stored: dict[str, Stored]) -> None:
    """That the tensors are those of the config, before a model of its size is made."""
    check_layers(path / "config.json", [("num_hidden_layers", config.layers)], stored)
    wanted = {name: tuple(tensor.shape) for name, tensor in Decoder(config, device="meta").state_dict().items()}
    names = {name for name in stored if not name.endswith(BUFFERS)}
    if config.tied:
        wanted.pop("lm_head.weight")
        names.discard("lm_head.weight")
    missing, extra = sorted(wanted.keys() - names), sorted(names - wanted.keys())
    if missing or extra:
        raise DataError(
            f"{path}: its tensors are not those of its config: missing {missing[:3] or 'none'}, unknown {extra[:3] or 'none'} "
            f"({len(missing)} and {len(extra)} in all); check that config.json belongs to these weights."
        )
    coded = [name for name in wanted if stored[name].dtype not in FLOATS]
    if coded:
        raise DataError(
            f"{stored[coded[0]].file}: {coded[0]} is {stored[coded[0]].dtype}, wanted one of {', '.join(FLOATS)}; quantised "
            "weights need a quantization_config in config.json, and transformers."
        )
    wrong = [name for name in wanted if stored[name].shape != wanted[name]]
    if wrong:
        raise DataError(
            f"{stored[wrong[0]].file}: {wrong[0]} has the shape {stored[wrong[0]].shape}, but config.json wants "
            f"{wanted[wrong[0]]} ({len(wrong)} such tensors); check that config.json belongs to these weights."
        )


def _write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """As write_whole does, and readable for whom the umask allows: what save_file makes, only its owner may read."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with writing(file):
            temporary.touch()
            mode = S_IMODE(temporary.stat().st_mode)
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.chmod(mode)
            os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


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
        (f"rope scaling {kind!r}", kind != "default"),
        (f"hidden_act {about.get('hidden_act')!r}", about.get("hidden_act", "silu") != "silu"),
        ("a sliding window shorter than its positions", window is not None and window < positions),
        ("a bias on o_proj or the MLP", family == "llama" and (about.get("attention_bias") or about.get("mlp_bias"))),
    ):
        if there:
            raise Beyond(f"{path}: the decoder has no {name}; use transformers with gb.place, which does.")
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


def hf_config(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a model of this shape."""
    if config.qkv_bias and config.qk_norm:
        raise ValueError("save_hf: no Hugging Face family has both q/k/v biases and normed heads; set one of them off.")
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
