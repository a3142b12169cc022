"""The tokenizer in a GGUF file's metadata: byte-level BPE, as Llama 3, Qwen, SmolLM and GPT-2 have."""

from typing import Any

from ..errors import DataError
from .gguf_file import GgufFile

CONTROL, USER_DEFINED = 3, 4  # types of tokens
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {"llama-bpe": WORDS.replace("DIGITS", "{1,3}"), "qwen2": WORDS.replace("DIGITS", "")}
BYTES = ("smollm", "gpt-2", "default")  # split as GPT-2 does; of SmolLM also digit by digit


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
    ids = {name: about.get(f"tokenizer.ggml.{key}_token_id") for name, key in NAMES.items()}
    named = {name: None if number is None else tokens[number] for name, number in ids.items()}
    if about.get("tokenizer.ggml.add_bos_token") and named["bos_token"] is not None:
        begin = [(named["bos_token"], ids["bos_token"])]
        inner.post_processor = processors.TemplateProcessing(f"{begin[0][0]} $A", f"{begin[0][0]} $A $B", begin)
    return inner, named.pop("eos_token"), about.get("tokenizer.chat_template"), named


NAMES = {"eos_token": "eos", "bos_token": "bos", "pad_token": "padding", "unk_token": "unknown"}
