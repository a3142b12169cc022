"""Hugging Face folders in and out: config.json and model.safetensors, for the families that the decoder covers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import DataError
from ..files import beside, read_json
from .decoder import Decoder, DecoderConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def load_hf(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Decoder:
    """The decoder in a Hugging Face folder. `dtype` None keeps what config.json says."""
    path = Path(path)
    about = _read_config(path)
    model = Decoder(config_of(about, path), device=device, dtype=dtype or _dtype(about))
    wanted = model.state_dict()
    found: dict[str, Tensor] = {}
    for file in _weight_files(path):
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (it is no dict)
    if model.config.tied and "model.embed_tokens.weight" in found:
        found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
    _check_names(path, wanted, found)
    model.load_state_dict(found)
    return model


def save_hf(model: Decoder, path: str | Path) -> Path:
    """Write a folder that transformers loads to the same logits."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().contiguous().cpu() for name, t in model.state_dict().items()}
    if model.config.tied:
        del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    dtype = next(model.parameters()).dtype
    (path / "config.json").write_text(json.dumps(hf_config(model.config, dtype), indent=2) + "\n")
    return path


def config_of(about: dict[str, Any], path: Path) -> DecoderConfig:
    """The decoder's shape from a config.json; what it cannot do is refused by name."""
    family = about.get("model_type")
    if family not in FAMILIES:
        raise DataError(
            f"{path}: model_type is {family!r}, wanted one of {', '.join(FAMILIES)}; use transformers with gb.place instead."
        )
    rope = about.get("rope_parameters") or {}
    kind = rope.get("rope_type", (about.get("rope_scaling") or {}).get("rope_type", "default"))
    window = about.get("sliding_window") if about.get("use_sliding_window", family == "mistral") else None
    for name, there in (
        (f"rope scaling {kind!r}", kind != "default"),
        (f"hidden_act {about.get('hidden_act')!r}", about.get("hidden_act", "silu") != "silu"),
        ("a sliding window shorter than its positions", bool(window) and window < about["max_position_embeddings"]),
        ("a bias on o_proj or the MLP", family == "llama" and (about.get("attention_bias") or about.get("mlp_bias"))),
    ):
        if there:
            raise DataError(f"{path}: the decoder has no {name}; use transformers with gb.place, which does.")
    return DecoderConfig(
        hidden=about["hidden_size"],
        intermediate=about["intermediate_size"],
        layers=about["num_hidden_layers"],
        heads=about["num_attention_heads"],
        kv_heads=about.get("num_key_value_heads") or about["num_attention_heads"],
        vocabulary=about["vocab_size"],
        tied=about.get("tie_word_embeddings", False),
        head_width=about.get("head_dim"),
        rope_theta=float(rope.get("rope_theta", about.get("rope_theta", 10000.0))),
        eps=about["rms_norm_eps"],
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        positions=about["max_position_embeddings"],
    )


def hf_config(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a model of this shape."""
    if config.qkv_bias and config.qk_norm:
        raise ValueError("save_hf: no Hugging Face family has both q/k/v biases and normed heads; set one of them off.")
    family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    return {
        "architectures": [ARCHITECTURES[family]],
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


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a Hugging Face model folder: {error}; give a folder with config.json.") from error


def _dtype(about: dict[str, Any]) -> torch.dtype:
    return getattr(torch, str(about.get("dtype") or about.get("torch_dtype") or "float32").removeprefix("torch."))


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    files = _indexed(index) if index.exists() else [path / "model.safetensors"]
    for file in files:
        if not file.exists():
            raise DataError(f"{path} has no {file.name}; download the whole model, in safetensors.")
    return files


def _indexed(index: Path) -> list[Path]:
    weight_map = read_json(index, "download it again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"{index}: weight_map: got {weight_map!r}, wanted a file name for each tensor; download it again.")
    return sorted({beside(index, name) for name in weight_map.values()})


def _check_names(path: Path, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or extra:
        raise DataError(
            f"{path}: its tensors are not those of its config: missing {missing[:3] or 'none'}, unknown {extra[:3] or 'none'} "
            f"({len(missing)} and {len(extra)} in all); check that config.json belongs to these weights."
        )
