"""Ops specific to DeepSeek-V4, as plain functions; each kernel is in triton/ under the same name (kernels/ops.py)."""

from .attention import (
    compress as compress,
    index_scores as index_scores,
    index_topk as index_topk,
    sparse_attention as sparse_attention,
    turn_heads as turn_heads,
)
from .hyper_connections import (
    hc_head as hc_head,
    hc_post as hc_post,
    hc_pre as hc_pre,
    hc_read as hc_read,
    hc_sums as hc_sums,
    hc_write as hc_write,
)
from .products import (
    choose_experts as choose_experts,
    norm_products as norm_products,
    routed_down as routed_down,
    send_products as send_products,
)
