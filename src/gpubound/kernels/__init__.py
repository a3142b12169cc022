"""Fast ops as plain functions: each checks its arguments, dispatches to a kernel or to its reference, and calls it.

An op's file holds that function and the op's definition. Its kernel is in triton/, under the same name and signature
(tests/test_mirror.py). Here a function and its file may share a name: `kernels.rope` is the function, and
`from gpubound.kernels.rope import ...` imports from the file.
"""

from .adamw import adamw as adamw, adamw8 as adamw8, plan_update as plan_update
from .cross_entropy import (
    cross_entropy as cross_entropy,
    divergence as divergence,
    linear_cross_entropy as linear_cross_entropy,
)
from .decode_adapters import add_adapters as add_adapters
from .decode_attention import decode_attention as decode_attention
from .decode_product import (
    Norm as Norm,
    add_norm as add_norm,
    add_product as add_product,
    norm_gate_up as norm_gate_up,
    norm_product as norm_product,
    norm_rows as norm_rows,
    send_product as send_product,
)
from .draft_inputs import begin_draft as begin_draft, extend_draft as extend_draft, keep_stream as keep_stream
from .experts import (
    add_routed as add_routed,
    add_slots as add_slots,
    column_down as column_down,
    column_gate_up as column_gate_up,
    gate_rows as gate_rows,
    route as route,
    routed_gate_up as routed_gate_up,
    select_experts as select_experts,
)
from .gated import (
    clamped_glu as clamped_glu,
    geglu as geglu,
    swiglu as swiglu,
    swiglu_backward as swiglu_backward,
    swiglu_product as swiglu_product,
    swiglu_product_backward as swiglu_product_backward,
)
from .invariant import (
    invariant_attention as invariant_attention,
    invariant_cached_attention as invariant_cached_attention,
    invariant_linear as invariant_linear,
)
from .latent_attention import (
    latent_attention as latent_attention,
    latent_queries as latent_queries,
    sink_attention as sink_attention,
)
from .lora import (
    lora_down as lora_down,
    lora_gradients as lora_gradients,
    lora_product as lora_product,
    lora_up as lora_up,
)
from .ngram_speculation import accept as accept, propose as propose
from .norms import add_rms_norm as add_rms_norm, group_norm as group_norm, layer_norm as layer_norm, rms_norm as rms_norm
from .peer_exchange import send_words as send_words, take_words as take_words
from .quantize import (
    dequantize_nf4 as dequantize_nf4,
    quantize as quantize,
    quantize_rows as quantize_rows,
    quantize_swiglu as quantize_swiglu,
    quantize_swiglu_backward as quantize_swiglu_backward,
    transpose as transpose,
)
from .quantized_product import (
    dequantize as dequantize,
    quantized_matmul as quantized_matmul,
    quantized_norm_gate_up as quantized_norm_gate_up,
)
from .recurrent import (
    chunk_scan as chunk_scan,
    delta_step as delta_step,
    mamba_step as mamba_step,
    short_conv as short_conv,
)
from .registry import reference as reference
from .rope import rope as rope, rope_qkv as rope_qkv
from .row_ops import (
    activate_rows as activate_rows,
    add_rows as add_rows,
    layer_norm_rows as layer_norm_rows,
    write_tokens as write_tokens,
)
from .sampling import pick as pick, sample as sample
from .split_product import split_gate_up as split_gate_up, split_product as split_product
