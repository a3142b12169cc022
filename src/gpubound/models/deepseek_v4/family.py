"""DeepSeek-V4's weights, and its modules over published codes: linear layers in fp8 and experts in fp4; and norms whose results
are rounded.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from ...kernels.decode_product import Norm
from ...kernels.packed_weights import Packed
from ...layers.fused_weights import hooked
from ...layers.quantized_base import OnlyCodes
from ..quantized.experts import Fp4Experts, built_with
from ..reader import FIXED, Reader, activation_name, linear_of, rope_types
from ..registry import Maker, role_of
from .kernels.products import Fp8Blocks, numbers, scales_shape


class Fp8Linear(OnlyCodes):
    """Replacement of a linear layer without a bias. The buffers are uint8, since `.to(torch.bfloat16)` would round
    floating-point buffers. transformers cannot load the saved buffers."""

    linear = True
    codes: Tensor
    scale: Tensor

    def __init__(self, layer: Any, block: tuple[int, int]) -> None:
        super().__init__()
        self.n_groups = getattr(layer, "n_groups", 0)  # of a grouped layer: each group of rows has a separate input
        self.block, self.dtype = block, layer.weight.dtype
        rows, columns = layer.weight.shape
        like = {"device": layer.weight.device, "dtype": torch.uint8}
        self.register_buffer("codes", torch.zeros(rows, columns, **like))
        across, down = scales_shape((rows, columns), block)
        self.register_buffer("scale", torch.zeros(across, 4 * down, **like))

    @property
    def blocks(self) -> Fp8Blocks:
        return Fp8Blocks(self.codes.view(torch.float8_e4m3fn), self.scale.view(torch.float32), self.block, self.dtype)

    @property
    def size(self) -> int:
        return self.codes.numel()

    def _apply(self, fn: Any, recurse: bool = True) -> "Fp8Linear":
        """Apply fn to the buffers, and to the dtype of the dequantised weight."""
        module = super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, device=self.codes.device, dtype=self.dtype)).dtype
        return module

    def forward(self, x: Tensor) -> Tensor:
        weight = numbers(self.blocks, x.dtype)
        if not self.n_groups:
            return F.linear(x, weight)
        return torch.einsum("...gk,grk->...gr", x, weight.unflatten(0, (self.n_groups, -1)))


class CompressedExperts(Fp4Experts):
    """DeepSeek-V4's experts over their codes."""

    original = theirs.DeepseekV4Experts  # the replaced class, for models/registry.py

    def __init__(self, config: Any) -> None:
        with torch.device("meta"):
            like = self.original(config)
        experts, rows, hidden = like.gate_up_proj.shape
        super().__init__(experts, hidden, rows // 2, persistent=True)
        self.act_fn, self.limit = like.act_fn, like.limit

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def in_fp4(wanted: bool) -> AbstractContextManager[None]:
    """Make transformers build models with experts in fp4 within the context, if `wanted`."""
    return built_with(theirs, "DeepseekV4Experts", CompressedExperts if wanted else None)


def keep_in_fp32(model: Any) -> None:
    """Convert parameters to fp32 as transformers' loading does, and make the norms `rounded` permanently."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    rounded(model)


def rounded(model: nn.Module) -> list[RemovableHandle]:
    """Register hooks that round the norms' outputs, and return their handles; empty if norms already round."""
    norms: list[Any] = [m for m in model.modules() if type(m).__name__ == "DeepseekV4RMSNorm"]
    if not norms or norms[0](norms[0].weight.detach().bfloat16()).dtype == torch.bfloat16:
        return []
    return [norm.register_forward_hook(_round) for norm in norms]


def _round(norm: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return y.to(inputs[0].dtype)


class LinearWeights(NamedTuple):
    """Weight, which may be in fp8, and bias of a linear layer."""

    weight: Any  # Tensor or Fp8Blocks
    bias: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[0]


def tensors_of(weights: Any) -> list[Tensor]:
    """Return all tensors of a record of weights, in field order."""
    return [t for t in tree_leaves(weights) if isinstance(t, Tensor)]


class HyperWeights(NamedTuple):
    """Hyper-connection by which attention or MLP reads n streams and writes to them."""

    product: Tensor  # ((2 + n) n, n · hidden): the scores of reading, of writing, and of mixing streams
    base: Tensor
    scale: Tensor  # (3,)
    rounds: int  # Sinkhorn iterations
    eps: float  # added to divisors that are sums
    norm_eps: float


class CollapseWeights(NamedTuple):
    """Hyper-connection by which the head reads n streams."""

    product: Tensor  # (n, n · hidden)
    base: Tensor
    scale: Tensor  # (1,)
    eps: float
    norm_eps: float


class EntryWeights(NamedTuple):
    """Compressor of `rate` tokens to an entry. `overlapping`: an entry also pools the preceding `rate` tokens, with separate
    products."""

    kv: LinearWeights
    gate: LinearWeights
    bias: Tensor  # (rate, width): added to gates by the token's index in its window
    norm: Norm
    rate: int
    overlapping: bool

    @property
    def span(self) -> int:
        """Number of tokens that an entry pools."""
        return self.rate * (1 + self.overlapping)


class IndexWeights(NamedTuple):
    entries: EntryWeights
    q: LinearWeights
    share: LinearWeights  # (heads, hidden): weight of each head in a token's scores
    heads: int
    top: int


class LatentWeights(NamedTuple):
    """Attention over one key and value head."""

    norm: Norm
    q_a: LinearWeights
    q_a_norm: Norm
    q_b: LinearWeights
    kv: LinearWeights
    kv_norm: Norm
    o_a: LinearWeights  # (groups · rank, heads · width / groups): each group of heads has separate rows
    o_b: LinearWeights
    sinks: Tensor  # (heads,): a softmax logit without a value
    heads: int
    groups: int
    window: int
    table: int  # of rotary angles: 0 for layers with only a window, 1 for layers with entries
    scale: float  # of the scores
    eps: float  # of the norm of a query's heads, which has no gain
    entries: EntryWeights | None
    indexer: IndexWeights | None


class MixtureWeights(NamedTuple):
    """Routed experts and one shared expert."""

    norm: Norm
    router: LinearWeights  # (E, hidden)
    correction: Tensor | None  # (E,): added to scores for routing only, not for shares
    table: Tensor | None  # (vocabulary, slots): experts of each token, if routing is by token
    score: Callable[[Tensor], Tensor]
    slots: int
    scale: float  # of the shares
    gate_up: Tensor | Packed  # (E, 2 I, hidden)
    down: Tensor | Packed  # (E, hidden, I)
    gate: LinearWeights  # shared expert's, like up and shared_down
    up: LinearWeights
    shared_down: LinearWeights
    limit: float  # gate is clamped to at most limit, up to ±limit, before their product


class StreamedLayerWeights(NamedTuple):
    attention_streams: HyperWeights
    attention: LatentWeights
    mixture_streams: HyperWeights
    mixture: MixtureWeights


SWAPS: dict[str, Maker] = {}
ROLES = {"self_attn": {"Attention"}, "mlp": {"SparseMoeBlock"}, "attn_hc": {"HyperConnection"}, "ffn_hc": {"HyperConnection"}}
ROUTERS = {"TopKRouter", "HashRouter"}


class CompressedReader(Reader):
    def refusal(self, max_length: int) -> str | None:
        for kind in rope_types(self.trunk.rotary_emb):
            if kind not in FIXED:
                return f"its rotary angles ({kind!r}) change with the length of what is read"
        if self.config.hidden_act != "silu":
            return f"its activation is {activation_name(self.config)!r}, that of the experts' kernels is silu"
        if self.config.scoring_func != "sqrtsoftplus":
            return f"its experts' scores are {self.config.scoring_func!r}, those of the kernels sqrtsoftplus"
        for number, block in enumerate(self.trunk.layers):
            parts = {name: (getattr(block, name), roles) for name, roles in ROLES.items()}
            parts |= {"mlp.gate": (block.mlp.gate, ROUTERS), "mlp.experts": (block.mlp.experts, {"Experts"})}
            parts |= {"self_attn.o_a_proj": (block.self_attn.o_a_proj, {"GroupedLinear"})}
            for name, (module, roles) in parts.items():
                if role_of(module) not in roles and not isinstance(module, Fp8Linear):
                    return f"model.layers.{number}.{name}: {type(module).__name__}, not the family's own"
                if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                    return f"model.layers.{number}.{name}: it carries hooks or another forward"
            limit, shared = block.mlp.experts.limit, getattr(block.mlp.shared_experts, "limit", None)
            if shared not in (None, limit):
                why = f"its experts are held within {limit}, and the one that all share within {shared}"
                return f"model.layers.{number}.mlp: {why}"
        return None

    @staticmethod
    def own_product(module: Any) -> bool:
        """Return True for a linear layer that only this family has."""
        return (isinstance(module, Fp8Linear) and not hooked(module)) or role_of(module) == "GroupedLinear"

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of every projection, router and stack of experts, by name, without parameters kept in fp32."""
        dtypes = {}
        for name, module in self.trunk.named_modules(prefix="model"):
            if isinstance(module, nn.Linear) or role_of(module) in ROUTERS:
                dtypes[name] = module.weight.dtype
            elif isinstance(module, Fp8Linear):
                dtypes[name] = module.dtype
            elif role_of(module) == "Experts":
                dtypes |= {f"{name}.{key}": weight.dtype for key, weight in module.named_parameters()}
        return dtypes

    def tables(self, length: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Return cos and sin (length, pairs) fp32 for layers with only a window, and for layers with entries."""
        like, positions = torch.empty(0, device=device, dtype=torch.float32), torch.arange(length, device=device)[None]
        angles = (self.trunk.rotary_emb(like, position_ids=positions, layer_type=kind) for kind in ("main", "compress"))
        return [(cos[0].contiguous(), sin[0].contiguous()) for cos, sin in angles]

    def collapse(self) -> CollapseWeights:
        head = self.trunk.hc_head
        weights = head._parameters["hc_fn"], head._parameters["hc_base"], head._parameters["hc_scale"]
        return CollapseWeights(*weights, eps=head.eps, norm_eps=head.input_norm.eps)

    def layers(self) -> list[Any]:
        return [
            StreamedLayerWeights(
                self.streams(block.attn_hc),
                self.latent(block.self_attn, block.input_layernorm),
                self.streams(block.ffn_hc),
                self.mixture(block.mlp, block.post_attention_layernorm),
            )
            for block in self.trunk.layers
        ]

    def streams(self, module: Any) -> HyperWeights:
        weights = module._parameters["fn"], module._parameters["base"], module._parameters["scale"]
        return HyperWeights(*weights, module.hc_sinkhorn_iters, module.hc_eps, module.input_norm.eps)

    def latent(self, attention: Any, norm: Any) -> LatentWeights:
        compressor = attention.compressor
        indexer = getattr(compressor, "indexer", None)
        return LatentWeights(
            norm=self.norm(norm),
            q_a=product_of(attention.q_a_proj),
            q_a_norm=self.norm(attention.q_a_norm),
            q_b=product_of(attention.q_b_proj),
            kv=product_of(attention.kv_proj),
            kv_norm=self.norm(attention.kv_norm),
            o_a=product_of(attention.o_a_proj),
            o_b=product_of(attention.o_b_proj),
            sinks=attention._parameters["sinks"],
            heads=attention.num_heads,
            groups=attention.o_a_proj.n_groups,
            window=attention.sliding_window,
            table=0 if attention.rope_layer_type == "main" else 1,
            scale=attention.scaling,
            eps=attention.q_b_norm.eps,
            entries=None if compressor is None else self.entries(compressor),
            indexer=None if indexer is None else self.index(indexer),
        )

    def entries(self, module: Any) -> EntryWeights:
        kv, gate = product_of(module.kv_proj), product_of(module.gate_proj)
        overlapping = kv.rows == 2 * module.head_dim
        return EntryWeights(
            kv, gate, module._parameters["position_bias"], self.norm(module.kv_norm), module.compress_rate, overlapping
        )

    def index(self, module: Any) -> IndexWeights:
        q, share = product_of(module.q_b_proj), product_of(module.scorer.weights_proj)
        return IndexWeights(self.entries(module), q, share, module.num_heads, module.index_topk)

    def mixture(self, block: Any, norm: Any) -> MixtureWeights:
        router, experts, shared = block.gate, block.experts, block.shared_experts
        packed = getattr(experts, "packed", None)  # quantised (coded.py)
        gate_up, down = (packed(part) if packed else experts._parameters[f"{part}_proj"] for part in ("gate_up", "down"))
        return MixtureWeights(
            norm=self.norm(norm),
            router=LinearWeights(router._parameters["weight"]),
            correction=router._buffers.get("e_score_correction_bias"),
            table=router._buffers.get("tid2eid"),
            score=router.score_fn,
            slots=router.top_k,
            scale=router.routed_scaling_factor,
            gate_up=gate_up,
            down=down,
            gate=product_of(shared.gate_proj),
            up=product_of(shared.up_proj),
            shared_down=product_of(shared.down_proj),
            limit=experts.limit,
        )

    def routers(self) -> dict[int, Any]:
        return {number: block.mlp.gate for number, block in enumerate(self.trunk.layers)}

    def indexers(self) -> dict[int, Any]:
        """Return the indexers by layer, for the layers that have one."""
        indexers = {n: getattr(block.self_attn.compressor, "indexer", None) for n, block in enumerate(self.trunk.layers)}
        return {number: indexer for number, indexer in indexers.items() if indexer is not None}


def product_of(layer: Any) -> LinearWeights:
    return LinearWeights(layer.blocks) if isinstance(layer, Fp8Linear) else LinearWeights(*linear_of(layer)[:2])


DECODING = {"ForCausalLM": CompressedReader}
