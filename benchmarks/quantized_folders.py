"""Folders of quantised models at published sizes with random codes: what reading one holds of the GPU, and how fast it decodes.

    gpubound bench families --parts folders

A folder is written to a temporary one and read as a user reads a published one. bench_families.py decodes it beside the
roofline of what a step reads: the codes with their scales, of experts those chosen. The model's own forward, with which tokens
are compared, multiplies by dequantised weights.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gpubound.models.hf_loading import load_foreign

from .families import TINY, config_of
from .harness import Bench, release

GROUP = 128  # columns of a scale of GPTQ
STD = 0.02  # of weights, as transformers draws them
DEVIATION = 4.6  # of 16 levels
LOADED = 1.15  # gate: the peak of loading, in sizes of the folder's weights

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class QuantizedFolder:
    """quantization_config, and how a linear layer's or the experts' weight is stored."""

    config: Callable[[bool], Any]
    quantization: dict[str, Any]
    store: Callable[[str, torch.Size, torch.device], Tensors | None]
    sparse: bool = False


def _llama(dry: bool) -> Any:
    import transformers

    large = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    small = TINY | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    rope = {"rope_type": "default", "rope_theta": 5e5}
    return transformers.LlamaConfig(**(small if dry else large), **ids, rms_norm_eps=1e-5, rope_parameters=rope)


def _mxfp4(name: str, shape: torch.Size, device: torch.device) -> Tensors | None:
    """Experts (E, K, N) as E2M1 codes of blocks of 32 of K, transposed, and a power of two for each."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return None
    experts, rows, columns = shape
    blocks = torch.randint(256, (experts, columns, rows // 32, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(118, 121, (experts, columns, rows // 32), dtype=torch.uint8, device=device)  # of 2^-9 to 2^-7
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _gptq(name: str, shape: torch.Size, device: torch.device, sort: bool) -> Tensors | None:
    """A weight (N, K) as words of eight levels of a column. sort: groups in another order of columns, one for layers that share
    their input, as GPTQ's act-order makes it."""
    if not name.endswith("_proj.weight"):
        return None
    rows, columns = shape
    layer, groups = name.removesuffix(".weight"), columns // GROUP
    word = torch.iinfo(torch.int32)
    index = torch.arange(columns, dtype=torch.int32, device="cpu") // GROUP
    if sort:
        index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(columns), device="cpu")]
    return {
        f"{layer}.qweight": torch.randint(word.min, word.max, (columns // 8, rows), dtype=torch.int32, device=device),
        f"{layer}.qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32, device=device),
        f"{layer}.scales": torch.full((groups, rows), STD / DEVIATION, dtype=torch.float16, device=device),
        f"{layer}.g_idx": index,
    }


def _gpt_oss(dry: bool) -> Any:
    return config_of("gpt-oss-20b", dry)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}
FOLDERS = {
    "gpt-oss-20b-mxfp4": QuantizedFolder(_gpt_oss, {"quant_method": "mxfp4"}, _mxfp4, sparse=True),
    "llama-8b-gptq": QuantizedFolder(_llama, {**GPTQ, "desc_act": False}, partial(_gptq, sort=False)),
    "llama-8b-gptq-act-order": QuantizedFolder(_llama, {**GPTQ, "desc_act": True}, partial(_gptq, sort=True)),
}


def write(folder: Path, about: QuantizedFolder, device: torch.device, dry: bool) -> int:
    """Write a folder, a file for each layer. Return the bytes of its tensors."""
    from transformers import AutoModelForCausalLM

    config, total = about.config(dry), 0
    dtype = torch.float32 if dry else torch.bfloat16
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in AutoModelForCausalLM.from_config(config).state_dict().items()}
    torch.manual_seed(0)
    files: dict[str, Tensors] = {}
    for name, shape in shapes.items():
        stored = about.store(name, shape, device)
        files.setdefault(".".join(name.split(".")[:3]), {}).update(stored or {name: _plain(name, shape, dtype, device)})
    index = {}
    for number, (part, tensors) in enumerate(files.items()):
        file = f"model-{number:05}.safetensors"
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"}
        )
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        files[part] = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    kept = config.to_dict() | {"architectures": [type(config).__name__.replace("Config", "ForCausalLM")]}
    kept |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": about.quantization}
    (folder / "config.json").write_text(json.dumps(kept))
    return total


def _plain(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype, device=device)
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device) * STD


def read(bench: Bench, name: str) -> Any:
    """Write a folder and read it. Its line is the peak of reading, in sizes of the folder's weights."""
    device = bench.device
    with tempfile.TemporaryDirectory() as temporary:
        size = write(folder := Path(temporary), FOLDERS[name], device, bench.dry)
        release(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        model = load_foreign(folder, device=device).eval()
        print(f"{name}: read in {time.perf_counter() - began:.1f} s, of which the page cache had all", flush=True)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        bench.figure(f"{name} peak of loading", "GiB", peak, {"folder": size / 2**30}, {"folder": 1 / LOADED})
    return model
