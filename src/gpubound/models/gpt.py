"""Families whose placing swaps norms and the loss alone: GPT-2, GPT-BigCode (SantaCoder, StarCoder), GPT-Neo, GPT-J, GPT-NeoX
(Pythia), OPT, Falcon, StableLM and Nemotron. All but StableLM have MLPs without a gate.

GPT-2, BigCode, GPT-Neo and OPT have learnt positions and no rotation; GPT-J, GPT-NeoX and Falcon parallel blocks. Weights in
another layout than the kernels' are copied, and copied again when they have changed: q, k and v of a head that follow each
other, and GPT-2's transposed weights. OPT-350m, whose norms follow the parts of a block, is not decoded by the kernels.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..kernels.row_ops import LayerNorm
from ..layers.attention import Angles, RotaryAngles
from ..layers.fused_weights import hooked
from ..layers.linear_product import format_of
from .decoding import Linear
from .reader import LayerNormReader, LearntReader, UngatedReader, linear_of, parts_of, weight_of
from .registry import Maker, role_of

SWAPS: dict[str, Maker] = {}
GPT = ("ln_1", None, "ln_2", None)
READS = frozenset((
    "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function", "layer_norm_epsilon", "attn_pdrop",
))  # fmt: skip


class FusedReader(UngatedReader):
    """Reader of models with q, k and v in one layer, QKV: groups of query heads, each before its key and its value head.

    OWN: the projections are of a class of the family's, and a step adds no adapters to them.
    """

    QKV, OWN = "query_key_value", False

    def refusal(self, max_length: int) -> str | None:
        for number, block in enumerate(self.blocks):
            attention, mlp = self.attention_of(block), self.mlp_of(block)
            qkv = getattr(attention, self.QKV)
            layers = qkv, getattr(attention, self.OUTPUT), *(getattr(mlp, name) for name in self.LAYERS)
            if self.OWN and not all(map(self.projects, layers)):
                return f"{self.BLOCKS}.{number}: a projection is not the family's own, or carries a low-rank adapter or hooks"
            if not self.OWN and format_of(linear_of(qkv).weight).coded and self.kv_heads(attention) > 1:
                return f"{self.BLOCKS}.{number}: q, k and v of a head are neighbours in one quantised weight"
        return super().refusal(max_length)

    def projections(self, attention: Any) -> list[Linear]:
        weight, bias, adapters = linear_of(getattr(attention, self.QKV))
        groups, width = self.kv_heads(attention), self.head_dim(attention)
        rows = [self.config.num_attention_heads * width, groups * width, groups * width]
        if groups == 1:
            return parts_of(getattr(attention, self.QKV), rows)

        def by_kind(t: Tensor) -> Tensor:
            heads = t.unflatten(0, (groups, -1, width))
            return torch.cat([heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)])

        def parts(t: Tensor) -> tuple[Tensor, ...]:
            return self.copies.of(t, by_kind).split(rows)

        lows = zip(*([type(low)(low.a, b, low.scale) for b in parts(low.b)] for low in adapters))
        biases = (None,) * 3 if bias is None else parts(bias)
        return [Linear(*part) for part in zip(parts(weight), biases, list(lows) or [()] * 3)]


class NeoXReader(FusedReader):
    READS = frozenset({"layer_norm_eps", "hidden_dropout", "classifier_dropout", "use_parallel_residual", "is_decoder"})
    EMBEDDING, FINAL, ATTENTION, OUTPUT = "embed_in", "final_layer_norm", "attention", "dense"
    LAYERS = ("dense_h_to_4h", "dense_4h_to_h")

    def kv_heads(self, attention: Any) -> int:
        """Return the number of query heads: the family has no other, and its modules do not read the config's."""
        return self.config.num_attention_heads


class GPT2Reader(FusedReader, LearntReader):
    NORMS = GPT
    READS = READS | frozenset((
        "scale_attn_weights", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
        "summary_proj_to_labels", "summary_first_dropout",
    ))  # fmt: skip
    BLOCKS, EMBEDDING, FINAL, ATTENTION, OUTPUT = "h", "wte", "ln_f", "attn", "c_proj"
    QKV, OWN = "c_attn", True

    def projects(self, module: nn.Module) -> bool:
        return type(module) is Conv1D and not hooked(module)

    def linear(self, layer: Any) -> Linear:
        return Linear(self.copies.of(weight_of(layer), Tensor.t), layer.bias)

    def projections(self, attention: Any) -> list[Linear]:
        weight, bias, _ = self.linear(attention.c_attn)
        assert bias is not None  # a Conv1D has one
        return [Linear(*pair) for pair in zip(weight.chunk(3), bias.detach().chunk(3))]


class BigCodeReader(FusedReader, LearntReader):
    NORMS = GPT
    READS = READS | {"scale_attn_weights", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "multi_query"}
    BLOCKS, EMBEDDING, FINAL, ATTENTION, OUTPUT = "h", "wte", "ln_f", "attn", "c_proj"
    QKV = "c_attn"

    def kv_heads(self, attention: Any) -> int:
        return attention.kv_heads


class NeoReader(LearntReader):
    NORMS = GPT
    READS = frozenset((
        "num_layers", "num_heads", "attention_types", "window_size", "activation_function", "resid_dropout", "embed_dropout",
        "classifier_dropout", "layer_norm_epsilon",
    ))  # fmt: skip
    BLOCKS, EMBEDDING, FINAL, OUTPUT = "h", "wte", "ln_f", "out_proj"

    def attention_of(self, block: Any) -> Any:
        return block.attn.attention

    def scale(self, attention: Any) -> float:
        return 1.0

    def window(self, attention: Any) -> int:
        return self.config.window_size if attention.attention_type == "local" else 0


class GPTJReader(UngatedReader):
    NORMS = ("ln_1", None, None, None)
    READS = READS | {"rotary_dim"}
    BLOCKS, EMBEDDING, FINAL, ATTENTION, OUTPUT = "h", "wte", "ln_f", "attn", "out_proj"
    LAYERS, INTERLEAVED, PARALLEL = ("fc_in", "fc_out"), True, True

    def scale(self, attention: Any) -> float:
        return getattr(attention, "scaling", None) or 1 / attention.scale_attn  # the latter before transformers 5.24

    def pairs(self) -> int:
        return self.config.rotary_dim // 2

    def angles(self) -> list[Angles]:
        return [RotaryAngles(self.config.rotary_dim)]


class OPTReader(LearntReader):
    """The layers of an MLP are the block's own."""

    NORMS = ("self_attn_layer_norm", None, "final_layer_norm", None)
    READS = frozenset((
        "ffn_dim", "word_embed_proj_dim", "dropout", "activation_function", "layerdrop", "init_std", "enable_bias",
    ))  # fmt: skip
    FINAL, OUTPUT, LAYERS, POSITIONS, SKIPPED = "final_layer_norm", "out_proj", ("fc1", "fc2"), "embed_positions", 2

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.trunk = model.model.decoder

    def mlp_of(self, block: Any) -> Any:
        return block

    def refusal(self, max_length: int) -> str | None:
        if self.trunk.project_in is not None:
            return "its embeddings have another width than its layers (word_embed_proj_dim)"
        return super().refusal(max_length)


class FalconReader(FusedReader):
    """One key and value head, or one for a group of heads."""

    READS = frozenset((
        "layer_norm_epsilon", "hidden_dropout", "num_kv_heads", "new_decoder_architecture", "multi_query", "parallel_attn",
        "bias", "ffn_hidden_size", "activation", "num_ln_in_parallel_attn",
    ))  # fmt: skip
    BLOCKS, EMBEDDING, FINAL, ATTENTION, OUTPUT = "h", "word_embeddings", "ln_f", "self_attention", "dense"
    LAYERS, OWN = ("dense_h_to_4h", "dense_4h_to_h"), True

    def projects(self, module: nn.Module) -> bool:
        return role_of(module) == "Linear" and not hooked(module)

    def parallel(self, block: Any) -> bool:
        return self.config.new_decoder_architecture or self.config.parallel_attn

    def kv_heads(self, attention: Any) -> int:
        return attention.num_kv_heads

    def scale(self, attention: Any) -> float:
        return attention.inv_norm_factor


class TwoNormsReader(FalconReader):
    NORMS = ("ln_attn", None, "ln_mlp", None)


def falcon(model: Any) -> FalconReader:
    """Return the reader of a smaller model, with one norm for both parts of a block, or of a larger one, with two."""
    return (TwoNormsReader if "ln_attn" in model.transformer.h[0]._modules else FalconReader)(model)


class StableLMReader(LayerNormReader):
    READS = frozenset({"layer_norm_eps", "use_qkv_bias", "use_parallel_residual", "hidden_dropout"})


class NemotronReader(UngatedReader):
    """The gain of its norms is 1 + weight."""

    READS = frozenset({"norm_eps"})
    LAYERS: ClassVar[tuple[str, str]] = ("up_proj", "down_proj")

    def norm(self, module: Any) -> LayerNorm:
        return super().norm(module)._replace(offset=1.0)


DECODING: dict[str, Any] = {
    "GPTNeoXForCausalLM": NeoXReader,
    "GPT2LMHeadModel": GPT2Reader,
    "GPTBigCodeForCausalLM": BigCodeReader,
    "GPTNeoForCausalLM": NeoReader,
    "GPTJForCausalLM": GPTJReader,
    "OPTForCausalLM": OPTReader,
    "FalconForCausalLM": falcon,
    "StableLmForCausalLM": StableLMReader,
    "NemotronForCausalLM": NemotronReader,
}
