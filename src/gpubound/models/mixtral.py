"""Llama's attention, and sparse layers, whose router chooses a few experts for each token.

Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and Mellum 2 choose by a softmax. MiniMax-M2, and GLM-4-MoE, dots.llm1 and Solar Open
within groups, choose by sigmoid scores plus a correction. These three and Qwen2-MoE also have an expert of every token.

Placing replaces norms, attention and the loss. Experts and the loop over layers stay those of transformers, and so does a loss
that includes the router's.
"""

from functools import partial
from typing import Any

from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from ..kernels.experts import ExpertRouting
from ..layers.fused_weights import hooked
from .decoding import DenseWeights, ExpertWeights, Linear
from .hf_modules import HFCausalLM, causal_lm, norm
from .layer_types import typed_attention
from .olmo import clipped_attention
from .reader import Reader, activation_name, linear_of, weight_of
from .registry import Maker, role_of


class SparseCausalLM(HFCausalLM):
    output = MoeCausalLMOutputWithPast

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        asked = kwargs.get("output_router_logits")
        if getattr(self.config, "output_router_logits", False) if asked is None else asked:
            return "the router's logits were asked for"
        return super().unable(kwargs)


sparse_causal_lm = partial(causal_lm, part=SparseCausalLM)
SPARSE: dict[str, Maker] = {"RMSNorm": norm, "Attention": clipped_attention, "ForCausalLM": sparse_causal_lm}
SWAPS: dict[str, Any] = SPARSE | {"mellum": SPARSE | {"Attention": typed_attention}}

# Roles and parameters of a sparse block's router, and of its experts.
PARTS = (("TopKRouter", "TopkRouter"), {"weight"}), (("Experts",), {"gate_up_proj", "down_proj"})


class SparseReader(Reader):
    """Reader of sparse blocks, with a router (`gate`) and the experts' weights stacked in two parameters.

    Qwen3-MoE may also have dense layers. Mixtral has none, and always divides the chosen experts' shares by their sum.
    """

    READS = frozenset((
        "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
        "decoder_sparse_step", "mlp_only_layers", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
        "shared_expert_intermediate_size", "qkv_bias", "n_shared_experts", "n_routed_experts", "routed_scaling_factor",
        "n_group", "topk_group", "first_k_dense_replace", "use_qk_norm", "num_mtp_layers",
    ))  # fmt: skip

    CORRECTION, ROUTER = "e_score_correction_bias", "gate"

    def refusal(self, max_length: int) -> str | None:
        if why := super().refusal(max_length):
            return why
        if self.activation() != "silu":
            return f"its activation is {activation_name(self.config)!r}, that of the experts' kernels is silu"
        sparse = self._sparse()
        for number, block in sparse.items():
            name = f"model.layers.{number}.mlp"
            for part, (classes, names) in zip((self.ROUTER, "experts"), PARTS):
                module = getattr(block, part)
                if role_of(module) not in classes or set(module._parameters) != names:
                    return f"{name}.{part}: {type(module).__name__}, not the family's own"
                if "forward" in vars(module):
                    return f"{name}.{part}: it carries a low-rank adapter, or another forward"
                if hooked(module):
                    return f"{name}.{part}: it carries hooks"
            if getattr(block.experts, "_is_expert_parallel", False):
                return f"{name}.experts: shared out among several devices"
        if len({(*block.experts.gate_up_proj.shape, self.router(block).top_k) for block in sparse.values()}) > 1:
            return "its sparse layers differ in experts or width"
        return None

    def mlp(self, block: Any) -> Any:
        if not _is_sparse(mlp := self.mlp_of(block)):
            return super().mlp(block)
        (before, after), router = self.mlp_norms(block), self.router(mlp)
        gate = mlp._modules.get("shared_expert_gate")
        assert before is not None
        return ExpertWeights(
            norm=before,
            router=Linear(weight_of(router)),
            gate_up=mlp.experts._parameters["gate_up_proj"],
            down=mlp.experts._parameters["down_proj"],
            slots=int(router.top_k),
            normalise=bool(getattr(router, "norm_topk_prob", True)),
            post_norm=after,
            routing=self.routing(mlp),
            shared=self.shared(mlp),
            shared_gate=None if gate is None else weight_of(gate),
        )

    def router(self, block: Any) -> Any:
        return getattr(block, self.ROUTER)

    def routing(self, block: Any) -> ExpertRouting | None:
        """Return how a sparse block chooses experts; None for a softmax."""
        router = self.router(block)
        correction = next((b for part in (router, block) if (b := part._buffers.get(self.CORRECTION)) is not None), None)
        if correction is None:
            return None
        groups, top_groups = getattr(router, "num_group", 1), getattr(router, "topk_group", 1)
        normalise, factor = getattr(router, "norm_topk_prob", True), getattr(router, "routed_scaling_factor", 1.0)
        return ExpertRouting(correction, bool(normalise), float(factor), groups, top_groups)

    def shared(self, block: Any) -> DenseWeights | None:
        """Return the expert of every token, or None."""
        mlp = block._modules.get("shared_expert") or block._modules.get("shared_experts")
        if mlp is None:
            return None
        gate, up = self.gate_up(mlp)
        return DenseWeights(None, gate, up, linear_of(mlp.down_proj))

    def routers(self) -> dict[int, Any]:
        return {number: self.router(block) for number, block in self._sparse().items()}

    def _sparse(self) -> dict[int, Any]:
        return {number: mlp for number, block in enumerate(self.trunk.layers) if _is_sparse(mlp := self.mlp_of(block))}


def _is_sparse(mlp: Any) -> bool:
    return role_of(mlp) in ("SparseMoeBlock", "MoE", "Moe")


class MellumReader(SparseReader):
    READS = SparseReader.READS | {"mlp_layer_types", "mtp_layer_types", "mtp_mlp_layer_types"}


DECODING = {"ForCausalLM": SparseReader, "MellumForCausalLM": MellumReader}
