"""Ops of DeepSeek-V4's decoder. Each kernel is in triton/ under the same name.

The decoder alone calls them, with contiguous tensors of the sizes that they name, so they check nothing.
"""

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
    quantized_routed_down as quantized_routed_down,
    routed_down as routed_down,
    send_products as send_products,
)
