"""Decoders by the name of a preset, and Hugging Face folders in and out: config.json and model.safetensors.

Every field of a config.json is checked before it is used. models/registry.py describes the interface.

A Decoder computes masked diffusion checkpoints, too: LLaDA and Dream. Their Python code is not run. LLaDA is a Llama that
attends in both directions, with OLMo's names of fields and tensors (models/storing.py renames these). Dream is a Qwen2 that
attends in both directions, and still predicts a token at the position before it.

A config may ask for another computation by many fields. Each field is one of those that are read here, or known to change
nothing in eval mode, or has the one value that a Decoder computes; all others are refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...data import Tokenizer
from ...errors import DataError
from ...layers.fused_weights import hooked
from ...layers.linear_product import multiply_by_records
from ...lora.layers import of_peft
from ..folder import LARGEST, MASK_ID, Beyond, ConfigFields, dtype_of, has_config, llada_name, needs_transformers, read_config
from ..language_model import LanguageModel
from ..quantized.schemes import scheme_of
from ..registry import FAMILIES, Sizes
from ..storing import Weights, fill, read_model, unread_model, write_model
from .decoder import BOTH_DIRECTIONS, PRESETS as PRESETS, Decoder, DecoderConfig

LLADA, DREAM = "llada", "Dream"  # model_type
NO_EFFECT = frozenset((
    "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "bos_token_id", "eos_token_id",
    "pad_token_id", "mask_token_id", "use_cache", "attention_dropout", "initializer_range",
    # LLaDA
    "attention_layer_norm_with_affine", "alibi_bias_max", "embedding_dropout", "residual_dropout", "flash_attention",
    "init_cutoff_factor", "init_device", "init_fn", "init_std", "precision", "rope_full_precision",
    # Dream
    "max_window_layers", "sliding_window",
))  # fmt: skip
# Fields of a DecoderConfig, and their names in files: those of transformers, which are Dream's, and those of LLaDA.
HF_NAMES = {
    "hidden": "hidden_size", "intermediate": "intermediate_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "vocabulary": "vocab_size", "tied": "tie_word_embeddings", "rope_theta": "rope_theta",
    "eps": "rms_norm_eps", "positions": "max_position_embeddings",
}  # fmt: skip
LLADA_NAMES = {
    "hidden": "d_model", "intermediate": "mlp_hidden_size", "layers": "n_layers", "heads": "n_heads", "kv_heads": "n_kv_heads",
    "vocabulary": "embedding_size", "tied": "weight_tying", "rope_theta": "rope_theta", "eps": "rms_norm_eps",
    "positions": "max_sequence_length", "qkv_bias": "include_qkv_bias",
}  # fmt: skip
# Values that a Decoder computes; the first is written. None where a missing field means the same.
LLADA_FIXED: dict[str, tuple[Any, ...]] = {
    "architectures": (["LLaDAModelLM"], None), "block_type": ("llama",), "activation_type": ("silu",),
    "layer_norm_type": ("rms",), "rope": (True,), "include_bias": (False,), "layer_norm_with_affine": (True, None),
    "bias_for_layer_norm": (False,), "attention_layer_norm": (False, None), "alibi": (False, None),
    "input_emb_norm": (False, None), "scale_logits": (False, None), "block_group_size": (1, None),
    "multi_query_attention": (None, False), "clip_qkv": (None,),
}  # fmt: skip
DREAM_FIXED: dict[str, tuple[Any, ...]] = {
    "architectures": (["DreamModel"], None), "hidden_act": ("silu",), "rope_scaling": (None,), "use_mrope": (False, None),
    "use_sliding_window": (False, None), "attention_bias": (True, None),
}  # fmt: skip


def masked_config(about: dict[str, Any], path: Path) -> DecoderConfig:
    """Convert a config.json of LLaDA or Dream to a DecoderConfig."""
    file, llada = path / "config.json", about["model_type"] == LLADA
    names, fixed = (LLADA_NAMES, LLADA_FIXED) if llada else (HF_NAMES, DREAM_FIXED)
    _check(about, file, fixed, {*names.values(), *(("mlp_ratio", "vocab_size") if llada else ())})
    fields = ConfigFields(about, file)
    mask = about.get("mask_token_id")
    if mask is not None:
        fields.size("mask_token_id")
    if llada:
        intermediate = min(fields.size("d_model") * fields.size("mlp_ratio", 4), LARGEST)
        values = sizes_of(fields, names, intermediate=intermediate, vocabulary=fields.size("vocab_size"))
        values["qkv_bias"] = fields.flag("include_qkv_bias")
    else:
        values = sizes_of(fields, names) | {"qkv_bias": True}
    values["rope_theta"] = fields.number("rope_theta", about.get("rope_theta"))
    try:
        config = DecoderConfig(**values, causal=False, shifted=not llada)
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error
    if config.head_dim % 2:
        raise DataError(f"{file}: got heads {config.head_dim} wide, wanted an even width; rotation works on pairs.")
    if mask is not None and mask >= config.vocabulary:
        raise DataError(f"{file}: mask_token_id: got {mask}, but the vocabulary has {config.vocabulary} tokens; correct one.")
    return config


def _check(about: Mapping[str, Any], file: Path, fixed: Mapping[str, tuple[Any, ...]], read: Collection[str]) -> None:
    for name in sorted(about.keys() | fixed.keys()):
        value = about.get(name)
        if name in fixed:
            if value not in fixed[name]:
                raise DataError(f"{file}: {name}: got {value!r}, and the decoder computes {fixed[name][0]!r} alone.")
        elif name not in read and name not in NO_EFFECT and value is not None:
            raise DataError(f"{file}: {name}: got {value!r}, an option that the reader of {about['model_type']} does not know.")


def sizes_of(fields: ConfigFields, names: Mapping[str, str], **defaults: int) -> dict[str, Any]:
    """Return the sizes of a DecoderConfig, whether its head is tied, and eps."""
    defaults["kv_heads"] = fields.size(names["heads"])
    sizes = "hidden", "intermediate", "layers", "heads", "kv_heads", "vocabulary"
    values: dict[str, Any] = {name: fields.size(names[name], defaults.get(name)) for name in sizes}
    values["positions"], values["tied"] = fields.size(names["positions"], largest=2**31), fields.flag(names["tied"])
    return values | {"eps": fields.number("rms_norm_eps", fields.about.get("rms_norm_eps"))}


def masked_hf_config(config: DecoderConfig, dtype: str, mask_token: int | None) -> dict[str, Any]:
    """Return the config.json of a Decoder with causal=False: Dream's if its predictions are shifted, else LLaDA's."""
    for field, value, wanted in (
        ("qk_norm", config.qk_norm, False),
        ("rope_factor", config.rope_factor, 1.0),
        ("head_width", config.heads * config.head_dim, config.hidden),
        ("qkv_bias", config.qkv_bias, config.qkv_bias or config.shifted),
    ):
        if value != wanted:
            raise ValueError(
                f"save_hf: {field}: got {getattr(config, field)!r}, which no LLaDA or Dream has; save its state_dict instead."
            )
    names, fixed = (HF_NAMES, DREAM_FIXED) if config.shifted else (LLADA_NAMES, LLADA_FIXED)
    about = {name: values[0] for name, values in fixed.items()} | {"vocab_size": config.vocabulary}
    about |= {"model_type": DREAM if config.shifted else LLADA, "torch_dtype": dtype, "mask_token_id": mask_token}
    return about | {name: getattr(config, field) for field, name in names.items()}


FOREIGN = True
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", LLADA, DREAM)  # model_types that Decoder implements

Config = TypeVar("Config", bound=DecoderConfig)


def small_variant(config: Config) -> Config:
    """Return a config with the options of a preset and two narrow layers, to test the preset's recipe on any machine."""
    heads = 2 * config.heads // config.kv_heads
    hidden = 16 * heads
    intermediate = round(hidden * config.intermediate / config.hidden / 16) * 16
    return replace(config, hidden=hidden, intermediate=intermediate, layers=2, heads=heads, kv_heads=2)


MODELS = PRESETS | {f"{name}-tiny": small_variant(config) for name, config in PRESETS.items() if name != "tiny"}


def for_text(config: Config, vocabulary: int, positions: int) -> Config:
    """Return the config for a tokenizer's vocabulary and sequences of that length."""
    # The head's rows are rounded up to a multiple of 64, for tensor cores. Tokens beyond the tokenizer's never occur.
    return replace(config, vocabulary=-(-vocabulary // 64) * 64, positions=max(positions, 4096))


def make(name: str, vocabulary: int, positions: int, device: torch.device) -> Decoder:
    return Decoder(for_text(MODELS[name], vocabulary, positions), device=device)


def reads(folder: Path) -> bool:
    return has_config(folder) and read_config(folder).get("model_type") in SUPPORTED


def sizes(model: LanguageModel) -> Sizes:
    config = model.config
    head = (config.vocabulary - len(model.classes)) * config.hidden if model.classes else 0
    return Sizes(config.vocabulary, config.product_parameters - head, config.layers, config.heads * config.head_dim)


def load_hf(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Decoder:
    """Load the Decoder in a Hugging Face folder. `dtype` None keeps that of config.json. Quantised weights stay quantised."""
    folder, about = Path(path), read_config(Path(path))
    if (scheme := scheme_of(folder, about)) is not None:
        return fill(unread(folder), scheme, torch.device(device), dtype or dtype_of(about, folder))
    return read_model(folder, Decoder, config_of, device, dtype, layers=_layers(about))


def unread(path: str | Path) -> Decoder:
    """Return the folder's Decoder on the meta device, for `read_parts` (storing.py) to fill."""
    return unread_model(Path(path), Decoder, config_of, layers=_layers(read_config(Path(path))))


def _layers(about: dict[str, Any]) -> str:
    """Return the field of config.json with the number of layers."""
    return "n_layers" if about.get("model_type") == LLADA else "num_hidden_layers"


def outline(path: str | Path) -> Decoder:
    """Return a Decoder with the folder's config on the meta device."""
    return Decoder(config_of(read_config(Path(path)), Path(path)), device="meta")


def save_hf(
    model: Decoder,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    weights: Weights | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a folder that transformers loads, with the same logits. An existing model is replaced only with `overwrite`.

    A model with causal=False is written as LLaDA or Dream, whose Python code for transformers is not part of the folder.
    With `tokenizer` the folder also has the tokenizer, and the tokens that begin, end and pad a text.
    """
    dtype, arguments = next(model.parameters()).dtype, (Path(path), tokenizer, weights, overwrite)
    if model.config.causal:
        return write_model(model, hf_config(model.config, dtype), *arguments)
    mask = model.generation.get(MASK_ID) if tokenizer is None or tokenizer.mask is None else tokenizer.mask
    config = masked_hf_config(model.config, str(dtype).removeprefix("torch."), mask)
    return write_model(model, config, *arguments, named=str if model.config.shifted else llada_name)


load, save = load_hf, save_hf


def as_transformers(model: Decoder) -> Any:
    """Return transformers' model with the Decoder's parameters, which are shared, not copied."""
    needs_transformers("a decoder without fused kernels")
    from transformers import AutoConfig, AutoModelForCausalLM

    if not model.config.causal:
        raise ValueError(
            f"decoder: model: got a Decoder that is not decoded token by token: {BOTH_DIRECTIONS}; generate with "
            f"gpubound.decode.MaskedSampler(model)."
        )
    if why := _no_hf_family(model.config):
        raise ValueError(
            f"decoder: model: got a Decoder that transformers cannot compute where the fused kernels do not: {why}; set "
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
    multiply_by_records(shell, everywhere=True)
    trunk: Any = shell.model
    trunk.rotary_emb = type(trunk.rotary_emb)(config=config).to(first.device)
    config.max_position_embeddings = 2**31 - 1  # a DecoderConfig's positions do not limit its code
    return shell.train(model.training)


def changed_below(model: Decoder) -> str | None:
    """Describe the first module that was removed, replaced or hooked since the Decoder was built; None if there is none."""
    modules = dict(model.named_modules())
    for name, original in Decoder(model.config, device="meta").named_modules():
        module = modules.get(name)
        if module is None:
            return f"without {name}"
        base = module.get_base_layer() if of_peft(module) else module  # type: ignore[operator]
        if name and type(base) is not type(original):
            return f"whose {name} is a {type(base).__name__}, not a {type(original).__name__}"
        if name and hooked(module):
            return f"whose {name} carries hooks"
    return None


def config_of(about: dict[str, Any], path: Path) -> DecoderConfig:
    """Convert a config.json to a DecoderConfig. Raise Beyond for an option that Decoder does not implement."""
    fields = ConfigFields(about, path / "config.json")
    family = about.get("model_type")
    if family not in SUPPORTED:
        raise Beyond(
            f"{path}: model_type is {family!r}, wanted one of {', '.join(SUPPORTED)}; use transformers with gb.place instead."
        )
    if family in (LLADA, DREAM):
        return masked_config(about, path)
    rope, scaling = fields.table("rope_parameters"), fields.table("rope_scaling")
    rope = scaling | rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    values = sizes_of(fields, HF_NAMES)
    windowed = family == "mistral" or (family != "llama" and about.get("use_sliding_window"))
    window = fields.size("sliding_window", largest=2**31) if windowed and about.get("sliding_window") is not None else None
    for missing, wanted in (
        (f"no rope scaling {kind!r}", kind not in ("default", "llama3")),
        (f"no hidden_act {about.get('hidden_act')!r}", about.get("hidden_act", "silu") != "silu"),
        ("no sliding window shorter than its positions", window is not None and window < values["positions"]),
        ("no bias on o_proj", family in ("llama", "qwen3") and about.get("attention_bias")),
        ("no bias on the MLP", family == "llama" and about.get("mlp_bias")),
    ):
        if wanted:
            raise Beyond(f"{path}: the decoder has {missing}; use transformers with gb.place, which does.")
    hidden, heads, kv_heads = (values[name] for name in ("hidden", "heads", "kv_heads"))
    head_dim = fields.size("head_dim", 0) or None
    if (heads % kv_heads) or (head_dim is None and hidden % heads) or (head_dim or hidden // heads) % 2:
        raise DataError(
            f"{path / 'config.json'}: got hidden_size {hidden}, num_attention_heads {heads}, num_key_value_heads {kv_heads}, "
            f"head_dim {head_dim}; wanted heads that divide hidden_size, key and value heads that divide the heads, and heads "
            "of an even width."
        )
    return DecoderConfig(
        **values,
        head_width=head_dim,
        rope_theta=fields.number("rope_theta", rope.get("rope_theta", about.get("rope_theta", 10000.0))),
        **(_llama3(fields, rope, path) if kind == "llama3" else {}),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


SCALING = {"rope_factor": "factor", "rope_low": "low_freq_factor", "rope_high": "high_freq_factor"}
"""Fields of a DecoderConfig -> keys of rope_parameters."""


def _llama3(fields: ConfigFields, rope: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of the rope scaling of Llama 3.1."""
    numbers: dict[str, Any] = {name: fields.number(key, rope.get(key)) for name, key in SCALING.items()}
    positions = fields.number("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    if not numbers["rope_low"] < numbers["rope_high"] or positions < 1:
        raise DataError(
            f"{path / 'config.json'}: rope_parameters: got low_freq_factor {numbers['rope_low']:g}, high_freq_factor "
            f"{numbers['rope_high']:g} and original_max_position_embeddings {positions:g}, wanted the first below the second, "
            f"and a position at least."
        )
    return numbers | {"rope_positions": int(positions)}


def _no_hf_family(config: DecoderConfig) -> str | None:
    both = config.qkv_bias and config.qk_norm
    return "no Hugging Face family has both q/k/v biases and normed heads" if both else None


def hf_config(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a Decoder."""
    if why := _no_hf_family(config):
        raise ValueError(f"save_hf: {why}; set one of them off.")
    family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    scaling: dict[str, Any] = {}
    if config.rope_factor != 1:
        scaling = {"rope_type": "llama3", "original_max_position_embeddings": config.rope_positions}
        scaling |= {key: getattr(config, name) for name, key in SCALING.items()}
    return {
        "architectures": [f"{FAMILIES['hf_modules'][family]}ForCausalLM"],
        "model_type": family,
        **{name: getattr(config, field) for field, name in HF_NAMES.items()},
        "head_dim": config.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta} | scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
