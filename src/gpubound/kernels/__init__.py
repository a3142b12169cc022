"""Every fast op of the library as a plain function: it checks its arguments, chooses an implementation (choose.py), calls it.

reference/ is the definition of each op, triton/ the fast form; tests/test_mirror.py keeps their names and signatures the same.
"""

from .attention import decode_attention as decode_attention
from .attention import quantized_decode_attention as quantized_decode_attention
from .decoding import add_product as add_product
from .decoding import norm_gate_up as norm_gate_up
from .decoding import norm_product as norm_product
from .decoding import norm_rows as norm_rows
from .experts import add_routed as add_routed
from .experts import route as route
from .experts import routed_gate_up as routed_gate_up
from .gated import geglu as geglu
from .gated import swiglu as swiglu
from .gated import swiglu_backward as swiglu_backward
from .lookup import add_rows as add_rows
from .losses import cross_entropy as cross_entropy
from .losses import linear_cross_entropy as linear_cross_entropy
from .norms import add_rms_norm as add_rms_norm
from .norms import dynamic_tanh as dynamic_tanh
from .norms import group_norm as group_norm
from .norms import layer_norm as layer_norm
from .norms import rms_norm as rms_norm
from .optim import adamw as adamw
from .optim import adamw8 as adamw8
from .optim import plan_update as plan_update
from .quantization import quantize as quantize
from .quantization import quantize_swiglu as quantize_swiglu
from .quantization import quantize_swiglu_backward as quantize_swiglu_backward
from .quantized import dequantize as dequantize
from .quantized import quantized_add_product as quantized_add_product
from .quantized import quantized_norm_gate_up as quantized_norm_gate_up
from .quantized import quantized_norm_product as quantized_norm_product
from .rotary import rope as rope
from .rotary import rope_qkv as rope_qkv
from .sampling import pick as pick
from .sampling import sample as sample
from .speculation import accept as accept
from .speculation import propose as propose
