"""GPT-NeoX (Pythia) and GPT-2: MLPs without a gate. NeoX has parallel blocks; GPT-2 has learnt positions and no rotation.

Both have weights in another layout than the kernels': NeoX's q, k and v of a head follow each other, and GPT-2's weights are
transposed. The decoder reads copies, and copies them again when they have changed. Placing swaps norms and the loss.
"""

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..layers.attention import Angles
from ..layers.fused_weights import hooked
from .decoding import Linear
from .reader import NoAngles, UngatedReader, weight_of
from .registry import Maker

SWAPS: dict[str, Maker] = {}


class NeoXReader(UngatedReader):
    READS = frozenset({"layer_norm_eps", "hidden_dropout", "classifier_dropout", "use_parallel_residual", "is_decoder"})
    EMBEDDING, FINAL, ATTENTION, OUTPUT = "embed_in", "final_layer_norm", "attention", "dense"
    LAYERS = ("dense_h_to_4h", "dense_4h_to_h")

    def projections(self, attention: Any) -> list[Linear]:
        layer, count, width = attention.query_key_value, self.config.num_attention_heads, attention.head_size

        def by_kind(t: Tensor) -> Tensor:
            return t.unflatten(0, (count, 3, width)).transpose(0, 1).flatten(0, 2)

        weights = self.copies.of(weight_of(layer), by_kind).chunk(3)
        biases = [None] * 3 if layer.bias is None else self.copies.of(layer.bias, by_kind).chunk(3)
        return [Linear(*pair) for pair in zip(weights, biases)]


class GPT2Reader(UngatedReader):
    NORMS = ("ln_1", None, "ln_2", None)
    READS = frozenset((
        "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function", "layer_norm_epsilon",
        "scale_attn_weights", "attn_pdrop", "reorder_and_upcast_attn", "summary_type", "summary_use_proj",
        "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    ))  # fmt: skip
    BLOCKS, EMBEDDING, FINAL, ATTENTION, OUTPUT = "h", "wte", "ln_f", "attn", "c_proj"

    def refusal(self, max_length: int) -> str | None:
        if max_length > (most := len(self.trunk.wpe.weight)):
            return f"it has {most} positions, and max_length is {max_length}"
        return super().refusal(max_length)

    def projects(self, module: nn.Module) -> bool:
        return type(module) is Conv1D and not hooked(module)

    def positions(self) -> Tensor:
        return weight_of(self.trunk.wpe)

    def angles(self) -> list[Angles]:
        return [NoAngles(self.head_dim(self.trunk.h[0].attn) // 2)]

    def table(self, attention: Any) -> None:
        return None

    def linear(self, layer: Any) -> Linear:
        return Linear(self.copies.of(weight_of(layer), Tensor.t), layer.bias)

    def projections(self, attention: Any) -> list[Linear]:
        weight, bias, _ = self.linear(attention.c_attn)
        assert bias is not None  # a Conv1D has one
        return [Linear(*pair) for pair in zip(weight.chunk(3), bias.detach().chunk(3))]


DECODING: dict[str, Any] = {"ForCausalLM": NeoXReader, "LMHeadModel": GPT2Reader}
