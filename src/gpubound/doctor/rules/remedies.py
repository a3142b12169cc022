"""Remedies by library and by use of the value, where the general one of an event does not help."""

from __future__ import annotations

import re

from ...watch.events import NUMBER, SCALARS, cause_of
from ...watch.ledger import LedgerRow

# Files in which a library reads or copies, and what its caller can do about it.
LIBRARIES = {
    "torch/distributions/": "pass validate_args=False, or Distribution.set_default_validate_args(False) once at the start",
    "torch/nn/modules/transformer.py": "pass is_causal (True for a causal mask), so that the mask is not compared",
    "torch/utils/tensorboard/": "write scalars every n steps, not in every one",
    "transformers/trainer.py": "pass TrainingArguments(logging_nan_inf_filter=False), and raise logging_steps",
    "transformers/masking_utils.py": "leave attention_mask out where no token is padding",
    "accelerate/optimizer.py": 'train in bf16, which needs no GradScaler: Accelerator(mixed_precision="bf16")',
    "torchmetrics/": "pass validate_args=False, and call compute() every n steps",
    "lightning/pytorch/callbacks/progress/": "log with prog_bar=False, or TQDMProgressBar(refresh_rate=50)",
    "pytorch_lightning/callbacks/progress/": "log with prog_bar=False, or TQDMProgressBar(refresh_rate=50)",
    "torchvision/utils.py": "make and save images every n steps, not in every one",
    "tqdm/": "call set_postfix every n steps, not in every one",
    "wandb/": "log every n steps, not in every one",
}
SHOWN = re.compile(
    r"\bprint\(|\.format\(|\bf[\"']|(?<!torch)(?<!math)(?<!np)\.log(_dict|_metrics)?\((?!\))|\blogg(er|ing)\.|\.add_scalars?\(|\bset_postfix\(|\bpbar\.|\btqdm\.write\("
)
METER = re.compile(r"\.update\(.*\.item\(\)")
RARELY = "read it only in the steps that show it (if step % 50 == 0), not in every one"
LATER = "give the meter loss.detach(), and read its sum when it is shown"
VALUES = frozenset({"item", "print", SCALARS})  # reads of a value, not of a size and not of a mask
INDEX = "copy the index to the device once: index = torch.as_tensor(index, device=x.device)"
INDEXED = re.compile(r"[\w)]\[([A-Za-z_]\w*)\](?!\s*=[^=])")
WRITTEN = re.compile(r"\]\s*=[^=]")  # x[i] = number
SCALAR = 16  # bytes
COPIED = re.compile(r"\.(to|cuda|copy_|type_as)\(|tensor\(|\.from_numpy\(", re.IGNORECASE)


def of_read(row: LedgerRow) -> str:
    """Return the remedy of a wait."""
    if row.place.through:  # events.THROUGH has its cause
        return cause_of("sync", row.what, row.place.through).remedy
    if remedy := _of_library(row):
        return remedy
    code = row.place.site.code if row.place.site else ""
    if row.what in VALUES and METER.search(code):
        return LATER
    return RARELY if row.what in VALUES and SHOWN.search(code) else cause_of("sync", row.what).remedy


def of_copy(row: LedgerRow) -> str:
    """Return the remedy of a copy by its library or its use; empty: that of its kind."""
    if remedy := _of_library(row):
        return remedy
    code = row.place.site.code if row.place.site else ""
    if row.kind == "d2h" and SHOWN.search(code):
        return RARELY
    if row.kind == "h2d" and row.bytes <= SCALAR * row.count and WRITTEN.search(code):
        return NUMBER.remedy
    return INDEX if index_of(row) else ""


def index_of(row: LedgerRow) -> str:
    """Return the name of the index that this line copies to the device, such as a NumPy array; empty for another copy."""
    code = row.place.site.code if row.place.site else ""
    match = INDEXED.search(code) if row.kind == "h2d" and row.place.via is None and not COPIED.search(code) else None
    return match[1] if match else ""


def _of_library(row: LedgerRow) -> str:
    file = row.place.via.file.replace("\\", "/") if row.place.via else ""
    return next((remedy for part, remedy in LIBRARIES.items() if f"/{part}" in file), "")
