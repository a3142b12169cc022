"""Choice of the scheme of a quantised folder, by config.json or by its GGUF file."""

from pathlib import Path
from typing import Any

from ...data.gguf_file import gguf_in
from ...errors import DataError
from ..folder import Beyond, Stored, stored_tensors
from .bitsandbytes import FourBits, Int8
from .fp8 import Fp8Scheme
from .gguf import Gguf
from .int4 import Awq, Gptq, Integers
from .mxfp4 import Mxfp4
from .scheme import Scheme

READ = "GPTQ, AWQ, FP8, MXFP4, compressed-tensors of 4 and 8 bits, bitsandbytes and GGUF"


def scheme_of(folder: Path, config: dict[str, Any]) -> Scheme | None:
    """Return the scheme of the folder's weights; None if they are not quantised. Raise Beyond for an unknown one."""
    if (file := gguf_in(folder)) is not None:
        return Gguf(file)
    options = config.get("quantization_config", config.get("compression_config"))
    if options is None:
        return None
    if not isinstance(options, dict):
        raise DataError(f"{folder / 'config.json'}: quantization_config: got {options!r}, wanted an object.")
    kind = _kind(options)
    if kind is None:
        what = " ".join(str(options[key]) for key in ("quant_method", "format") if key in options) or sorted(options)
        raise Beyond(
            f"{folder / 'config.json'}: quantization_config: got {what!r}, wanted one of {READ}; take another quantisation of "
            "the model, or its 16-bit weights."
        )
    scheme = kind(folder, stored_tensors(folder), options)
    if expert := next((layer for layer in scheme.layers if ".experts." in layer), None):
        raise Beyond(
            f"{folder / 'config.json'}: quantization_config: got {scheme.name} of experts, first {expert}, wanted dense "
            "layers, or gpt-oss in MXFP4; take another quantisation of the model, or its 16-bit weights."
        )
    return scheme


def _kind(options: dict[str, Any]) -> type[Scheme] | None:
    method, form = options.get("quant_method"), str(options.get("format", ""))
    if method == "bitsandbytes" or "load_in_4bit" in options:
        return FourBits if options.get("load_in_4bit", options.get("_load_in_4bit")) else Int8
    if method in ("compressed-tensors", "compressed_tensors"):
        types = {str(group.get("weights", {}).get("type")) for group in options.get("config_groups", {}).values()}
        if form in ("float-quantized", "naive-quantized") and types == {"float"}:
            return Fp8Scheme
        return Integers if form in ("int-quantized", "pack-quantized", "naive-quantized") and types == {"int"} else None
    return {"gptq": Gptq, "awq": Awq, "fp8": Fp8Scheme, "mxfp4": Mxfp4}.get(str(method))


def numbers_stored(scheme: Scheme) -> dict[str, Stored]:
    """Return the metadata of the folder's weights as if none was quantised."""
    stored = {name: scheme.stored[name] for name in scheme.plain_names()}
    for layer, shape in scheme.layers.items():
        first = scheme.stored[scheme.tensors(layer)[0]]
        stored[f"{layer}.weight"] = Stored(first.file, shape, "F16")
    return stored
