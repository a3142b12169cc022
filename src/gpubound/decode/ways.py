"""How many rows of a step are multiplied which way: one after the other, together by kernels of our own, or by cuBLAS."""

import torch

from ..device import can_launch
from ..models.decoding import DenseWeights
from .layer import GEMV_ROWS
from .runner import RunnerConfig
from .weight_view import WeightView

# Rows of a step that are few: GEMV_ROWS of packed weights and experts, and where a speculating row must get the bits of a plain
# step. Where cuBLAS can read the weights, a third row costs more than its tensor cores do. H200, us a step by rows, kernels and
# cuBLAS: 350m 3: 743, 953; 8: 1,524, 870. 1b 2: 1,094, 1,035; 8: 4,177, 1,073. 8b 8: 22,368, 4,638.
FEW = 2
# How many rows are taken together at most where a layer's gate and up have so many bytes. H200, us a step by rows, together and
# otherwise: 350m (17 MB) 2: 495, 538; 4: 507, 920; 8: 527, 841; 16: 750, 865; 32: 1,050, 908. 1b (67 MB) 2: 946, 1,052; 4: 969,
# 1,046; 8: 1,025, 1,064, and 1,078 on another machine; 16: 1,355, 1,090. 8b, by its products alone: slower.
TILED = ((32 << 20, 16), (96 << 20, 4))


def gemv_rows(build: RunnerConfig) -> int:
    """The most rows of a step that are multiplied one after the other, of a model without experts."""
    return FEW if build.tokens == 1 and build.weights is None else GEMV_ROWS


def tiled_gemm_rows(live: WeightView, build: RunnerConfig) -> int:
    """The most rows of a step that kernels of our own take together (kernels/tiled_product.py); 0 where they take none.

    Of a dense model in bf16, with a row a sequence. They round x times its norm's gain, which in fp16 may have no end, and add
    no adapters.
    """
    parts = [layer.mlp for layer in live.layers if isinstance(layer.mlp, DenseWeights)]
    if build.max_batch == 1 or build.tokens > 1 or build.weights is not None or not live.whole or len(parts) < len(live.layers):
        return 0
    if live.dtype != torch.bfloat16 or not can_launch(live.device):
        return 0
    largest = max(mlp.gate.weight.nbytes + mlp.up.weight.nbytes for mlp in parts)
    return next((rows for most, rows in TILED if largest <= most), 0)
