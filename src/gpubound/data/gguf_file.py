"""The header of a GGUF file, and the config.json and the tokenizer that its metadata describe.

A file begins with metadata (key, type, value) and the tensors' names, shapes (columns first), types and offsets; the data
follow. models/quantized/gguf.py has the block formats.
"""

import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError

CURE = "download the model again"
MAGIC, ALIGNMENT = b"GGUF", 32
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
PLAIN = {0: ("F32", torch.float32), 1: ("F16", torch.float16), 30: ("BF16", torch.bfloat16)}
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
MODELS = ("llama", "qwen2", "qwen3")  # values of general.architecture

# Of the tokenizer: byte-level BPE, as Llama 3, Qwen, SmolLM and GPT-2 have.
CONTROL, USER_DEFINED = 3, 4  # types of tokens
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {"llama-bpe": WORDS.replace("DIGITS", "{1,3}"), "qwen2": WORDS.replace("DIGITS", "")}
BYTES = ("smollm", "gpt-2", "default")  # split as GPT-2 does; of SmolLM also digit by digit
SPECIAL_TOKENS = {"eos_token": "eos", "bos_token": "bos", "pad_token": "padding", "unk_token": "unknown"}


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: its rows and columns, type, first byte."""

    shape: tuple[int, ...]
    type: int
    start: int


class GgufFile:
    """Header of a GGUF file; `rows` reads a tensor's bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._data = mmap(file.fileno(), 0, access=ACCESS_READ)
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, IndexError, ValueError) as error:
            raise DataError(f"{path} is not a complete GGUF file: {error}; {CURE}.") from error

    def _read_header(self) -> None:
        if self._data[:4] != MAGIC:
            raise ValueError(f"it begins with {bytes(self._data[:4])!r}, not {MAGIC!r}")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, wanted 2 or 3")
        tensors, pairs = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {self._string(): self._value(self._scalar("<I")) for _ in range(pairs)}
        fields = []
        for _ in range(tensors):
            name, sizes = self._string(), [self._scalar("<Q") for _ in range(self._scalar("<I"))]
            fields.append((name, tuple(reversed(sizes)), self._scalar("<I"), self._scalar("<Q")))
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: Entry(shape, kind, start + offset) for name, shape, kind, offset in fields}

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        size = self._scalar("<Q")
        self._at += size
        if self._at > len(self._data):
            raise ValueError("a string ends after the file")
        return self._data[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            of, count = self._scalar("<I"), self._scalar("<Q")
            return [self._value(of) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"a value of type {kind}")
        return self._scalar(SCALARS[kind])

    def bytes(self, name: str, nbytes: int) -> Tensor:
        """Return a copy of the tensor's first bytes."""
        start = self.tensors[name].start
        if start + nbytes > len(self._data):
            raise DataError(f"{self.path} ends within {name}; {CURE}.")
        return torch.from_numpy(np.frombuffer(self._data, np.uint8, nbytes, start).copy())

    @property
    def architecture(self) -> Any:
        return self.metadata.get("general.architecture")

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a key of the model's architecture."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise DataError(f"{self.path} has no {self.architecture}.{name}; {CURE}.")
        return value

    def config(self) -> dict[str, Any]:
        """Return the config.json of the model that the file describes."""
        model = self.architecture
        if model not in MODELS:
            raise DataError(f"{self.path}: general.architecture: got {model!r}, wanted one of {', '.join(MODELS)}.")
        need = {
            "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
            "num_attention_heads": "attention.head_count", "max_position_embeddings": "context_length",
            "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        }  # fmt: skip
        config = {ours: self.value(theirs) for ours, theirs in need.items()}
        heads = config["num_attention_heads"]
        width = self.value("attention.key_length", config["hidden_size"] // heads)
        usual = {"scaling.type": "none", "scaling.factor": 1.0, "scale_linear": 1.0, "dimension_count": width}
        scaled = any(self.value(f"rope.{key}", plain) != plain for key, plain in usual.items())
        if scaled or "rope_freqs.weight" in self.tensors:
            raise DataError(
                f"{self.path}: its rotary angles are scaled, or of a part of each head, which its metadata describe in part; "
                "put the model's own config.json into the folder."
            )
        return config | {
            "model_type": model,
            "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model] + "ForCausalLM"],
            "num_key_value_heads": self.value("attention.head_count_kv", heads),
            "head_dim": width,
            "rope_theta": self.value("rope.freq_base", 10000.0),
            "vocab_size": self.tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "hidden_act": "silu",
            "dtype": "float16",
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.metadata.get("tokenizer.ggml.padding_token_id"),
        }


def tokenizer_of(file: GgufFile) -> tuple[Any, str | None, Any, dict[str, str | None]]:
    """Return (the `tokenizers` library's tokenizer, end of text, chat template, other special tokens by name)."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    about = file.metadata
    kind, split = about.get("tokenizer.ggml.model"), about.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in (*PATTERNS, *BYTES):
        raise DataError(
            f"{file.path}: its tokenizer is {kind!r} with {split!r}, wanted 'gpt2' with one of "
            f"{', '.join((*PATTERNS, *BYTES))}; put the model's own tokenizer.json into the folder."
        )
    tokens, types = about["tokenizer.ggml.tokens"], about.get("tokenizer.ggml.token_type", [])
    merges = [tuple(merge.split(" ", 1)) for merge in about.get("tokenizer.ggml.merges", [])]
    inner = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges, ignore_merges=split == "llama-bpe"))
    if split in PATTERNS:
        parts = [pre_tokenizers.Split(Regex(PATTERNS[split]), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    else:
        parts = [pre_tokenizers.Digits(True)] * (split == "smollm") + [pre_tokenizers.ByteLevel(False)]
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence(parts), decoders.ByteLevel()
    for special, wanted in ((True, CONTROL), (False, USER_DEFINED)):
        added = [AddedToken(token, special=special, normalized=False) for token, n in zip(tokens, types) if n == wanted]
        (inner.add_special_tokens if special else inner.add_tokens)(added)
    ids = {name: about.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    named = {name: None if number is None else tokens[number] for name, number in ids.items()}
    if about.get("tokenizer.ggml.add_bos_token") and named["bos_token"] is not None:
        begin = [(named["bos_token"], ids["bos_token"])]
        inner.post_processor = processors.TemplateProcessing(f"{begin[0][0]} $A", f"{begin[0][0]} $A $B", begin)
    return inner, named.pop("eos_token"), about.get("tokenizer.chat_template"), named


def gguf_in(folder: Path) -> Path | None:
    """Return the folder's GGUF file, if no safetensors hold its weights."""
    if any(folder.glob("*.safetensors")):
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise DataError(
            f"{folder} holds {len(files)} GGUF files, first {files[0].name} and {files[1].name}; wanted one, in a folder for "
            "itself."
        )
    return files[0] if files else None


def hf_name(name: str) -> str:
    """Return Hugging Face's name of a tensor: blk.0.attn_q.weight is model.layers.0.self_attn.q_proj.weight."""
    stem, _, part = name.rpartition(".")
    block, _, rest = stem.removeprefix("blk.").partition(".")
    if stem.startswith("blk."):
        return f"model.layers.{block}.{NAMES.get(rest, rest)}.{part}"
    return f"{NAMES.get(stem, stem)}.{part}"
