"""The contenders of whole LoRA steps, one a process: rank 16 on all linear layers, AdamW over the adapters alone.

The frozen weights are in bf16, and the adapters in fp32: PEFT's by its default, ours as the step's masters. PEFT multiplies by
them in fp32; under autocast, which is what Trainer's bf16=True does, in bf16. Both are measured.
"""

import math
import re
import zlib
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module

import torch
from torch import nn

import gpubound.lora

from .serving import Contender, Job, serve
from .shapes import SHAPES
from .train_worker import Attach, llama, ours, use_liger, usual

RANK, ALPHA = 16, 32.0
ADAPTERS = 8  # in one batch
LAYER = re.compile(r"layers\.\d+\.\w+\.\w+")  # an adapted layer, in the names of its parameters, ours and PEFT's


BASES = ("nf4", "int8", "fp8")  # formats of frozen weights beside bf16


def add(model: nn.Module, base: str | None = None) -> nn.Module:
    gpubound.lora.add(model, RANK, ALPHA, base=base)
    return begin(model)


def rows(job: Job) -> Contender:
    """Several adapters in one batch: each row of it has the next one."""
    names = [f"adapter{i}" for i in range(ADAPTERS)]

    def attach(model: nn.Module) -> nn.Module:
        for name in names:
            gpubound.lora.add(model, RANK, ALPHA, name=name)
        gpubound.lora.rows(model, names)
        return begin(model)

    return ours(job, attach=attach, more={"adapter_ids": torch.arange(job.micro, device=job.device) % ADAPTERS})


def get_peft_model(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    return begin(get_peft_model(model, config))


def begin(model: nn.Module) -> nn.Module:
    """The same a for everyone, drawn as PEFT draws it; b is zero already."""
    found = 0
    for name, p in model.named_parameters():
        if p.requires_grad and (".lora_A." in name or name.endswith(".a")):
            layer = LAYER.search(name)
            assert layer is not None
            with torch.no_grad():
                p.copy_(drawn(layer[0], tuple(p.shape)))
            found += 1
    assert found > 0
    return model


@cache
def drawn(layer: str, shape: tuple[int, int]) -> torch.Tensor:
    g = torch.Generator().manual_seed(zlib.crc32(layer.encode()))
    return (2 * torch.rand(shape, generator=g) - 1) / math.sqrt(shape[1])


def adapted(job: Job, attach: Attach = add) -> Contender:
    """Our step with adapters. Before its clock starts their values are drawn, PEFT is imported (0.7 s), and the conversions are
    listed that transformers lists when it loads a model (0.3 s), as its peers' are."""
    import_module("peft")
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    shape = SHAPES[job.shape]
    widths = {"self_attn.o_proj": shape.heads * shape.head_dim, "mlp.down_proj": shape.intermediate}
    for layer in range(shape.layers):
        for part in (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))):
            drawn(f"layers.{layer}.{part}", (RANK, widths.get(part, shape.hidden)))
    return ours(job, attach=attach)


def freeze(model: nn.Module, base: str | None = None) -> nn.Module:
    """All but the first norm's gain. Its gradient needs dX through the whole model, and costs next to nothing itself."""
    model.requires_grad_(False)
    if base is not None:
        gpubound.lora.quantize_base(model, base)
    gain = next(p for name, p in model.named_parameters() if name.endswith("input_layernorm.weight"))
    gain.requires_grad_(True)
    return model


def peft(job: Job, autocast: bool = False, compiled: bool = False, liger: bool = False) -> Contender:
    if liger:
        use_liger()
    dtype = torch.bfloat16 if job.device != "cpu" else torch.float32
    return usual(job, get_peft_model(llama(job, dtype)), autocast, "default" if compiled else "")


CONTENDERS: dict[str, Callable[[Job], Contender]] = {
    "ours": adapted,
    "ours-lora": adapted,
    "ours-peft": partial(adapted, attach=get_peft_model),
    "ours-rows": rows,
    "floor": partial(ours, attach=freeze),
    "peft": peft,
    "peft-autocast": partial(peft, autocast=True),
    "peft-compile": partial(peft, compiled=True),
    "peft-compile-autocast": partial(peft, autocast=True, compiled=True),
    "peft-liger": partial(peft, liger=True),
    "peft-liger-autocast": partial(peft, autocast=True, liger=True),
}
for base in BASES:
    CONTENDERS[f"ours-{base}"] = partial(adapted, attach=partial(add, base=base))
    CONTENDERS[f"floor-{base}"] = partial(ours, attach=partial(freeze, base=base))


if __name__ == "__main__":
    serve(CONTENDERS)
