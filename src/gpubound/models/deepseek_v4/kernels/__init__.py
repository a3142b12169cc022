"""Ops specific to DeepSeek-V4, as plain functions; each kernel is in triton/ under the same name (kernels/ops.py)."""

from .chosen_experts import choose_experts as choose_experts
from .compressor import compress as compress
from .hc_step import hc_read as hc_read, hc_sums as hc_sums, hc_write as hc_write
from .hyper_connections import hc_head as hc_head, hc_post as hc_post, hc_pre as hc_pre
from .indexer import index_scores as index_scores, index_topk as index_topk
from .norm_products import norm_products as norm_products, send_products as send_products
from .sinkhorn import sinkhorn as sinkhorn
from .sparse_attention import sparse_attention as sparse_attention
from .turned_heads import turn_heads as turn_heads
