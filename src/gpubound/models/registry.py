"""Registry of model families: the module that implements a family, and the class names that transformers gives its models.

Hugging Face modules are recognised by class name and module: `LlamaMLP` of transformers.models.llama.modeling_llama. A user's
subclass lives elsewhere, may compute something else, and is not recognised.

A family's module has two tables by role of a module (Attention, MLP, ForCausalLM, ...): SWAPS, how placing replaces modules,
and DECODING, how a model is decoded (decoding.py). A module of several families has some of its SWAPS by model_type, each a
separate table, and some of its readers by class name. It is imported on first use. A family with more than one file is a
package, which has these tables in `family.py`.

SWAPS is {role: maker}, or {model_type: {role: maker}}. A maker gets a module and its decoder stack, and returns a `Swap`.
Placing refuses modules that it must not replace, verifies the replacement with inputs such as `random_case` makes, and reports
it. The replacement's `fused_kernels` describes its kernels for the report. Calls that it does not support go to the forward of
the module's original class.

A family that is trained by name, or loaded into our own model, is a package in TRAINABLE with a module `checkpoint.py`:

PRESETS, MODELS   configs by name: those that are listed for users; and all that `make` knows, which includes smaller variants
                  (NAME-tiny) and, for models of named parts, NAME+PART
FOREIGN           True if transformers has these models too
make              (name, vocabulary, positions, device) -> a new model
reads, load, save True if a folder is the family's; (folder, device, dtype or None) -> model; (model, folder, tokenizer,
                  iterator over weights or None, overwrite)
config_of         (config.json, folder) -> config; raises Beyond if our own model does not implement it
outline, unread   model of a folder on the meta device, from config.json; the same with checked tensors, for storing.read_parts
sizes             `Sizes` of a model
NOTE              a line below the list of presets; optional
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.dispatch import Call, can_launch
from ..layers import Attention, LMLoss, RMSNorm
from ..layers.linear_product import format_of, is_sharded
from ..trace import count
from .decoding import AttentionWeights, DenseWeights
from .reader import Reader, text_stack

# Names of the KV cache in transformers: `cache` since 5.24, `past_key_values` before, and in models from elsewhere.
NAMES = ("cache", "past_key_values")
WRAPPER = "ForConditionalGeneration"
PATCHED = "its class has another forward than when it was placed"
BATCH, TOKENS = 2, 16
TEXT_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")

Case = Callable[[torch.dtype], tuple[Tensor, dict[str, Any]]]
"""dtype -> (x, keywords): x gets a gradient; the same values in every dtype"""


def cache_name(function: Callable[..., Any]) -> str | None:
    """Return the name of a function's KV cache parameter (or of an output class's field), or None."""
    parameters = signature(function).parameters
    return next((name for name in NAMES if name in parameters), None)


def cache_word(function: Callable[..., Any]) -> str:
    """Return the name of the KV cache parameter of a function that is known to have one."""
    name = cache_name(function)
    assert name is not None, f"{function} takes no keys and values"
    return name


def cache_in(output: Mapping[str, Any]) -> Any:
    """Return the KV cache among a model's outputs, or None. The older name as an attribute of 5.24's outputs would warn."""
    return next((value for name, value in output.items() if name in NAMES), None)


@dataclass
class Swap:
    """Replacement of a module: the new class, its additional attributes, and the cases by which it is verified."""

    part: type
    calls: tuple[Call, ...]  # ops and shapes that the replacement calls, so that they can be compiled in parallel
    attributes: dict[str, Any] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    refusal: str = ""
    trial: Callable[[], str | None] | None = None  # an additional check: returns why not to swap, or None


Maker = Callable[[Any, Any], Swap]
"""(module, the decoder stack with a rotary_emb that contains it, or None) -> its Swap"""


class Delegating:
    """Base class of replacements that call the original forward for unsupported calls."""

    original: Any  # class of the module
    forwards: tuple[Any, Any]  # the replacement's and the original class's forward, when the module was placed
    config: Any
    training: bool
    delegated: Counter[str]

    def delegate(self, why: str, *args, **kwargs):
        """Call the original forward and count the call: same result, fewer fusions."""
        self.delegated[why] += 1
        count("place.delegated")
        return self.original.forward(self, *args, **kwargs)

    def patched(self) -> str | None:
        """Return why the replacement's forward may differ from the class's current one; None if that was not changed."""
        return None if self.original.forward is self.forwards[1] else PATCHED

    def by_name(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return positional and keyword arguments by the parameter names of the original forward."""
        return dict(zip(_names(self.original.forward), args)) | kwargs


@cache
def _names(forward: Callable) -> tuple[str, ...]:
    return tuple(name for name in signature(forward).parameters if name != "self")


def noise(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Tensor:
    """Return normal values, the same on every device and in every dtype, without changing the global RNG state."""
    draw = _drawn if torch.Size(shape).numel() <= KEPT else _drawn.__wrapped__
    return draw(tuple(shape), seed).to(like.device, like.dtype, copy=True)


KEPT = 1 << 20  # elements of values that are kept on the host


@lru_cache(8)
def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return normal values. The layers of a model are compared on the same ones: to draw them took 0.9 s of placing 8B."""
    with torch.inference_mode(False):  # a tensor made inside could not be saved for backward later
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)


def random_case(module: nn.Module, shape: tuple[int, ...]) -> Case:
    """Return a case of normal values, rounded to the module's dtype first, so that every dtype gets the same values."""
    like = next(module.parameters(), torch.empty(0, device="cpu", dtype=torch.float32)).detach().new_empty(0)
    return lambda dtype: (noise(shape, like).to(dtype), {})


def reads_tokens(model: Any) -> bool:
    """Return whether this is a transformers model of text, read left to right. One that also takes images reads text alone."""
    config: Any = getattr(model, "config", None)
    return (
        getattr(model, "main_input_name", None) == "input_ids"
        and hasattr(model, "get_input_embeddings")
        and hasattr(config, "get_text_config")
        and hasattr(config.get_text_config(), "vocab_size")
        and not getattr(config, "is_encoder_decoder", False)
    )


def made_up(model: Any, seed: int = 0) -> Tensor:
    """Return random token ids for a model, the same at every call. Ids of images or sounds are left out."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(getattr(model, "lm_head", None), LMLoss):
        size, others = model.config.vocabulary, set()
    else:
        size, names = model.config.get_text_config().vocab_size, vars(model.config)
        others = {names[name] for name in names if name.endswith(("_token_id", "_token_index")) and name not in TEXT_TOKENS}
    ids = torch.randint(size, (BATCH, TOKENS), generator=generator, device="cpu")
    if others:
        text = torch.tensor([i for i in range(min(size, 1024)) if i not in others], device="cpu")
        ids = text[ids % len(text)]
    return ids.to(next(model.parameters()).device)


def switch(changes: Iterable[tuple[nn.Module, dict[str, Any]]]) -> Callable[[], None]:
    """Set attributes of modules. Return a function that restores them, or those of the class."""
    changed = [(vars(module), values) for module, values in changes]
    before = [{name: own[name] for name in values if name in own} for own, values in changed]
    for own, values in changed:
        own.update(values)

    def undo() -> None:
        for (own, values), was in zip(changed, before):
            for name in values:
                own.pop(name, None)
            own.update(was)

    return undo


@contextmanager
def mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Set training or eval mode in all of `module` within the context, and restore each sub-module's mode after it."""
    modes = [(m, m.training) for m in module.modules()]
    try:
        module.train(training)
        yield
    finally:
        for m, value in modes:
            m.training = value


@contextmanager
def put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of these tensors after the context."""
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)


FAMILIES = {
    # module: {model_type: prefix of its class names}
    "hf_modules": {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"},
    "layer_types": {"ministral": "Ministral", "cwm": "Cwm"},
    "mixtral": {
        "mixtral": "Mixtral",
        "qwen3_moe": "Qwen3Moe",
        "olmoe": "Olmoe",
        "qwen2_moe": "Qwen2Moe",
        "glm4_moe": "Glm4Moe",
        "dots1": "Dots1",
        "minimax_m2": "MiniMaxM2",
        "solar_open": "SolarOpen",
        "mellum": "Mellum",
    },
    "gemma": {
        "gemma": "Gemma",
        "gemma2": "Gemma2",
        "vaultgemma": "VaultGemma",
        "gemma3": "Gemma3",
        "gemma3n": "Gemma3n",
        "gemma4": "Gemma4",
        "gemma4_unified": "Gemma4Unified",
    },
    "olmo": {"olmo": "Olmo", "olmo2": "Olmo2", "olmo3": "Olmo3", "exaone4": "Exaone4"},
    "granite": {"granite": "Granite", "granitemoehybrid": "GraniteMoeHybrid", "hyperclovax": "HyperCLOVAX"},
    "cohere": {
        "cohere": "Cohere",
        "cohere2": "Cohere2",
        "glm": "Glm",
        "glm4": "Glm4",
        "ernie4_5": "Ernie4_5",
        "helium": "Helium",
    },
    "phi": {"phi": "Phi", "phi3": "Phi3"},
    "gpt": {
        "gpt_neox": "GPTNeoX",
        "gpt2": "GPT2",
        "gpt_bigcode": "GPTBigCode",
        "gpt_neo": "GPTNeo",
        "gptj": "GPTJ",
        "opt": "OPT",
        "falcon": "Falcon",
        "stablelm": "StableLm",
        "nemotron": "Nemotron",
    },
    "ungated": {"arcee": "Arcee", "jais2": "Jais2", "seed_oss": "SeedOss", "starcoder2": "Starcoder2"},
    "gpt_oss": {"gpt_oss": "GptOss"},
    "latent": {
        "axk1": "AXK1",
        "deepseek_v2": "DeepseekV2",
        "deepseek_v3": "DeepseekV3",
        "glm4_moe_lite": "Glm4MoeLite",
        "youtu": "Youtu",
        "minicpm3": "MiniCPM3",
        "ministral3": "Ministral3",
        "mistral4": "Mistral4",
    },
    "hybrids": {
        "bamba": "Bamba",
        "mamba2": "Mamba2",
        "falcon_h1": "FalconH1",
        "nemotron_h": "NemotronH",
        "lfm2": "Lfm2",
        "lfm2_moe": "Lfm2Moe",
    },
    "qwen": {
        "qwen3_5": "Qwen3_5",
        "qwen3_next": "Qwen3Next",
        "qwen3_5_moe": "Qwen3_5Moe",
        "qwen2_vl": "Qwen2VLText",
        "qwen2_5_vl": "Qwen2_5_VLText",
        "qwen3_vl": "Qwen3VLText",
        "qwen3_vl_moe": "Qwen3VLMoeText",
    },
    "deepseek_v4": {"deepseek_v4": "DeepseekV4"},
}
# Models of images or sounds and text, as in FAMILIES, with a stack of one of these families inside.
WRAPPERS = {
    "audioflamingo3": "AudioFlamingo3",
    "aya_vision": "AyaVision",
    "cohere2_vision": "Cohere2Vision",
    "cosmos3_omni": "Cosmos3Omni",
    "deepseek_vl": "DeepseekVL",
    "deepseek_vl_hybrid": "DeepseekVLHybrid",
    "exaone4_5": "Exaone4_5_",
    "fast_vlm": "FastVlm",
    "fun_asr_nano": "FunAsrNano",
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "gemma4_unified": "Gemma4Unified",
    "glmasr": "GlmAsr",
    "got_ocr2": "GotOcr2",
    "hyperclovax_vision_v2": "HyperCLOVAXVisionV2",
    "idefics2": "Idefics2",
    "idefics3": "Idefics3",
    "internvl": "InternVL",
    "janus": "Janus",
    "kimi_k25": "Kimi_K25",
    "lfm2_vl": "Lfm2Vl",
    "lighton_ocr": "LightOnOcr",
    "llava": "Llava",
    "llava_next": "LlavaNext",
    "llava_next_video": "LlavaNextVideo",
    "llava_onevision": "LlavaOnevision",
    "minicpm_ocr": "MiniCPMOcr",
    "minicpmv4_6": "MiniCPMV4_6",
    "minicpmv4_7": "MiniCPMV4_7",
    "mistral3": "Mistral3",
    "moss_transcribe_diarize": "MossTranscribeDiarize",
    "musicflamingo": "MusicFlamingo",
    "ovis2": "Ovis2",
    "perception_lm": "PerceptionLM",
    "qianfan_ocr": "QianfanOCR",
    "qwen2_audio": "Qwen2Audio",
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_asr": "Qwen3ASR",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "smolvlm": "SmolVLM",
    "vibevoice_asr": "VibeVoiceAsr",
    "video_llama_3": "VideoLlama3",
    "video_llava": "VideoLlava",
    "vipllava": "VipLlava",
    "voxtral": "Voxtral",
}
# Modules with the runners of families that the fused kernels do not decode, imported when a decoder is built.
RUNNERS = {"deepseek_v4": ".deepseek_v4.decode"}
# (model_type, quant_method) of quantised checkpoints that a family's `checkpoint.load_coded` reads
QUANTIZED = {("deepseek_v4", "fp8")}
TRAINABLE = ("llama", "richards")


def role_of(module: nn.Module) -> str | None:
    """Return the role of a module of a known family ('RMSNorm', 'Attention', 'MLP', 'Model', 'ForCausalLM', ...), or None."""
    return _known(module)[1]


def swaps_of(module: nn.Module) -> Mapping[str, Maker]:
    """Return the SWAPS table of the module's family, empty for an unknown family."""
    family, _ = _known(module)
    if family is None:
        return {}
    swaps = _module(family).SWAPS
    return swaps.get(_type_of(module), swaps)


def reader_of(model: Any) -> Reader | None:
    """Return the model's Reader, or None for an unknown family. Our own models have a class attribute `reader`."""
    if (own := getattr(type(model), "reader", None)) is not None:
        return own(model)
    known = text_stack(model) if is_wrapper(model) else model
    family, role = _known(known)
    if family is None:
        return None
    role = role if known is model else "ForCausalLM"
    readers = _module(family).DECODING
    maker = readers.get(f"{FAMILIES[family][_type_of(known)]}{role}") or readers.get(role)
    return None if maker is None else maker(model)


def is_wrapper(model: nn.Module) -> bool:
    """Return whether this is a language model of images or sounds and text of a type in WRAPPERS."""
    kind = getattr(type(model), "original", type(model))
    names = {f"transformers.models.{key}.modeling_{key}": f"{prefix}{WRAPPER}" for key, prefix in WRAPPERS.items()}
    return names.get(kind.__module__) == kind.__name__


def runner_of(model: nn.Module) -> Any:
    """Return the module with the runners of a model's family, or None if decode/ runs the model itself."""
    name = RUNNERS.get(_known(model)[0] or "")
    return None if name is None else import_module(name, __package__)


def decoded() -> Iterator[str]:
    """Yield the class name prefixes of models that the fused kernels decode."""
    return (prefix for family, types in FAMILIES.items() if family not in RUNNERS for prefix in types.values())


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Return True if this config.json is of a quantised checkpoint that `load_quantized` reads instead of transformers."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and (config.get("model_type"), quantization.get("quant_method")) in QUANTIZED


def load_quantized(config: Mapping[str, Any], *args: Any, **options: Any) -> nn.Module:
    """Load a quantised checkpoint by its family's `checkpoint.load_coded`."""
    return import_module(f".{config['model_type']}.checkpoint", __package__).load_coded(*args, **options)


def _module(family: str) -> Any:
    """Import a family's module, which imports transformers."""
    module = import_module(f".{family}", __package__)
    return import_module(".family", module.__name__) if hasattr(module, "__path__") else module


def _type_of(module: nn.Module) -> str:
    """Return the model_type of transformers' module that has the module's class, or ""."""
    home = getattr(type(module), "original", type(module)).__module__.split(".")
    return home[2] if home[:2] == ["transformers", "models"] and home[3:] == [f"modeling_{home[2]}"] else ""


def _known(module: nn.Module) -> tuple[str | None, str | None]:
    """Return (family, role) of a module, or (None, None)."""
    kind, model_type = getattr(type(module), "original", type(module)), _type_of(module)
    for family, types in FAMILIES.items():
        if model_type in types:
            return family, kind.__name__.removeprefix(types[model_type])
    return None, None


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model that a training run needs: its vocabulary, and those that determine its FLOPs."""

    vocabulary: int
    product_parameters: int  # parameters that every token is multiplied by
    layers: int
    width: int  # of attention: all heads together


def trainable() -> list[Any]:
    return [import_module(f".{folder}.checkpoint", __package__) for folder in TRAINABLE]


def presets() -> list[str]:
    return [name for family in trainable() for name in family.PRESETS]


def is_named(model: str) -> bool:
    """Return True if `model` is the name of a model, and not a folder."""
    return any(model in family.MODELS for family in trainable())


def family_of(model: str) -> Any:
    """Return the `checkpoint` module of the family that makes the named model, or reads the folder.

    If no family reads the folder, return the first: its `load` raises an error that names the supported models.
    """
    families = trainable()
    named = next((family for family in families if model in family.MODELS), None)
    return named or next((family for family in families if family.reads(Path(model))), families[0])


PLACE = "place it first (gb.place)"


def why_not_invariant(model: Any) -> str | None:
    """Return why a model's results would depend on what is computed with them even in a BatchInvariant context; None if not.

    It is a dense model of the Llama kind, gb.Decoder or placed, without a window or caps.
    """
    name = type(model).__name__
    reader = reader_of(model)
    if reader is None or (why := reader.refusal(1)):
        return (
            f"{name} is {why if reader is not None else 'none of the families with fused kernels, which docs/models.md lists'}"
        )
    shape = reader.shape()
    if shape.logit_cap or shape.logit_scale != 1:
        return f"{name} caps or scales its logits"
    for number, layer in enumerate(reader.layers()):
        attention = layer.attention
        if type(attention) is not AttentionWeights or type(layer.mlp) is not DenseWeights:
            return f"layer {number} of {name} is not dense: its experts have no batch-invariant kernel"
        if attention.window or attention.cap or attention.v is None or attention.v_eps or any(layer[2:]):
            return f"layer {number} has a window, capped scores or shared keys, and its batch-invariant kernel has none"
    return next((f"{key}: {why}" for key, module in _modules_of(reader) if (why := _depends_on_batch(module))), None)


def _modules_of(reader: Any) -> list[tuple[str, nn.Module]]:
    head = reader.model.lm_head
    return [*((f"model.{key}", module) for key, module in reader.trunk.named_modules() if key), ("lm_head", head)]


def _depends_on_batch(module: Any) -> str | None:
    """Return why a module would not be computed row by row."""
    weights = module._parameters.values()
    if any(weight is not None and (format_of(weight).coded or is_sharded(weight)) for weight in weights):
        return "its weights are quantised or sharded"
    kind = type(module).__name__
    if isinstance(module, nn.Linear | nn.Embedding | RMSNorm | nn.ModuleList) or not any(True for _ in weights):
        alone = kind.endswith("Attention") and not isinstance(module, Attention)
        return f"it is a {kind} of transformers; {PLACE}" if alone else None
    device = next(weight.device for weight in weights if weight is not None)
    # torch sums a row of a GPU by as many threads as few rows leave idle
    return (
        f"the sums of a {kind} depend on the number of rows; {PLACE}" if can_launch(device) or device.type == "cuda" else None
    )
