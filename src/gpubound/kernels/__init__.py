"""Every fast op of the library as a plain function: it checks its arguments, chooses an implementation (choose.py), calls it.

An op's file holds that function and the op's definition. Its kernel is in triton/, under the same name and signature
(tests/test_mirror.py). Here a function and its file may share a name: `kernels.rope` is the function, and
`from gpubound.kernels.rope import ...` reads the file.
"""

from .adamw import adamw as adamw
from .adamw import adamw8 as adamw8
from .adamw import plan_update as plan_update
from .add_rows import add_rows as add_rows
from .cross_entropy import cross_entropy as cross_entropy
from .cross_entropy import linear_cross_entropy as linear_cross_entropy
from .decode_attention import decode_attention as decode_attention
from .decode_attention import quantized_decode_attention as quantized_decode_attention
from .decode_product import add_norm as add_norm
from .decode_product import add_product as add_product
from .decode_product import norm_gate_up as norm_gate_up
from .decode_product import norm_product as norm_product
from .decode_product import norm_rows as norm_rows
from .experts import add_routed as add_routed
from .experts import route as route
from .experts import routed_gate_up as routed_gate_up
from .gated import geglu as geglu
from .gated import swiglu as swiglu
from .gated import swiglu_backward as swiglu_backward
from .group_norm import group_norm as group_norm
from .norms import add_rms_norm as add_rms_norm
from .norms import dynamic_tanh as dynamic_tanh
from .norms import layer_norm as layer_norm
from .norms import rms_norm as rms_norm
from .ops import reference as reference
from .quantize import quantize as quantize
from .quantize import quantize_swiglu as quantize_swiglu
from .quantize import quantize_swiglu_backward as quantize_swiglu_backward
from .quantized_product import dequantize as dequantize
from .quantized_product import quantized_add_product as quantized_add_product
from .quantized_product import quantized_add_routed as quantized_add_routed
from .quantized_product import quantized_norm_gate_up as quantized_norm_gate_up
from .quantized_product import quantized_norm_product as quantized_norm_product
from .quantized_product import quantized_routed_gate_up as quantized_routed_gate_up
from .rope import rope as rope
from .rope import rope_qkv as rope_qkv
from .sampling import pick as pick
from .sampling import sample as sample
from .speculation import accept as accept
from .speculation import propose as propose
