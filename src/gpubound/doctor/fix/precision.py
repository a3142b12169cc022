"""Let fp32 products use the tensor cores: ten bits of a factor's fraction instead of 23."""

from .patch import Patch
from .source import Edit, Refused, SourceText, imported

LINE = 'torch.set_float32_matmul_precision("high")'


def propose(source: SourceText, line: int) -> list[Edit]:
    if b"set_float32_matmul_precision" in source.data or b"allow_tf32" in source.data or b"fp32_precision" in source.data:
        raise Refused("the file sets the precision of fp32 products itself")
    if not source.imports_torch:
        raise Refused("the file does not import torch by that name")
    return imported(source, LINE)


PATCH = Patch("tf32", frozenset({"precision"}), "fp32 products run in TF32", propose, equal=False, asked=True)
