"""Richards language model: any mixer, MLP and norm of its config, causal or not.

Children are named as Hugging Face names them.

Legend: B batch, T tokens.

The config names the parts. A part is one line of a table, with its module and its cost. A mixer has `mix(x, rope, mask)`, an
MLP `mix(x)`, a norm `forward(x)` and `add(x, pending)`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...formatting import hint
from ...kernels.dispatch import Call
from ...layers.attention import Attention, Mask, RopeTable, RotaryAngles, turn_calls
from ...layers.block import MLP, Block, RMSNorm, gated_calls, run_blocks
from ...layers.embedding_and_head import embedding, look_up
from ...layers.moe import MoE
from ..decoding import ExpertWeights, Linear
from ..language_model import LanguageModel
from ..llama.decoder import BOTH_DIRECTIONS, DecoderConfig, OwnReader
from .kernels.poly_attention import DEGREES
from .layers import RGLRU, DynamicTanh, PolyAttention, RichardsGLU, poly_calls, rg_lru_calls, richards_glu_calls

POLY = ("degree", "soft_clip", "window", "gates")


@dataclass(frozen=True)
class NamedPart:
    """A choice of a mixer, an MLP or a norm."""

    make: Callable[..., nn.Module]  # (config, device=, dtype=)
    products: Callable[["RichardsConfig"], int] = lambda c: 0  # parameters that a token is multiplied by
    calls: Callable[["RichardsConfig"], Iterable[Call]] = lambda c: ()  # ops of a training step, with their shapes
    options: tuple[str, ...] = ()  # fields of the config that only some parts read
    lifts: bool = False  # multiply embeddings by √hidden, for norms that do not normalise them
    backwards: bool = True  # supports causal=False


def _attention(c: "RichardsConfig") -> dict[str, Any]:
    sizes = {"hidden": c.hidden, "heads": c.heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim}
    return sizes | {"bias": c.qkv_bias, "qk_norm": c.eps if c.qk_norm else None, "causal": c.causal}


def _projections(c: "RichardsConfig") -> int:
    return 2 * c.hidden * c.head_dim * (c.heads + c.kv_heads)


def _attention_calls(c: "RichardsConfig") -> Iterable[Call]:
    return turn_calls(c.heads, c.kv_heads, c.head_dim, c.head_dim // 2, c.qk_norm)


def _poly_options(c: "RichardsConfig") -> dict[str, Any]:
    return {option: getattr(c, option) for option in POLY}


def _poly_calls(c: "RichardsConfig") -> Iterable[Call]:
    return *_attention_calls(c), *poly_calls(c.heads, c.kv_heads, c.head_dim, **_poly_options(c), causal=c.causal)


def _gated(c: "RichardsConfig") -> int:
    return 3 * c.hidden * c.intermediate


def _gated_calls(c: "RichardsConfig") -> Iterable[Call]:
    return gated_calls("silu", c.intermediate)


MIXERS = {
    "softmax": NamedPart(
        lambda c, **where: Attention(**_attention(c), **where), _projections, _attention_calls, ("qkv_bias", "qk_norm")
    ),
    "poly": NamedPart(
        lambda c, **where: PolyAttention(**_attention(c), **_poly_options(c), positions=c.positions, **where),
        lambda c: _projections(c) + c.gates * c.hidden * c.heads,
        _poly_calls,
        ("qkv_bias", "qk_norm", *POLY),
    ),
    "rg_lru": NamedPart(
        lambda c, **where: RGLRU(c.hidden, **where), lambda c: 4 * c.hidden**2, lambda c: rg_lru_calls(), backwards=False
    ),
}
MLPS = {
    "swiglu": NamedPart(lambda c, **where: MLP(c.hidden, c.intermediate, **where), _gated, _gated_calls),
    "richards_glu": NamedPart(
        lambda c, **where: RichardsGLU(c.hidden, c.intermediate, **where), _gated, lambda c: richards_glu_calls(c.intermediate)
    ),
    "moe": NamedPart(
        lambda c, **where: MoE(c.hidden, c.intermediate, c.experts, c.slots, c.balance > 0, **where),
        lambda c: c.experts * c.hidden + c.slots * _gated(c),
        _gated_calls,
        ("experts", "slots", "balance"),
    ),
}
NORMS = {
    "rms": NamedPart(
        lambda c, **where: RMSNorm(c.hidden, c.eps, **where),
        calls=lambda c: (("rms_norm", (c.hidden,)), ("add_rms_norm", (c.hidden,))),
    ),
    "dyt": NamedPart(
        lambda c, **where: DynamicTanh(c.hidden, c.alpha, **where),
        calls=lambda c: (("dynamic_tanh", (c.hidden,)), ("add_dynamic_tanh", (c.hidden,))),
        options=("alpha",),
        lifts=True,
    ),
}
TABLES = {"attention": MIXERS, "mlp": MLPS, "norm": NORMS}  # by the field of the config


@dataclass(frozen=True)
class RichardsConfig(DecoderConfig):
    """A DecoderConfig and the names of the parts. An option that none of the chosen parts reads must keep its default."""

    attention: str = "softmax"
    mlp: str = "swiglu"
    norm: str = "rms"
    rope: bool = True  # False: no rotary positions
    degree: int = 3  # of poly attention: 1, 3, 5 or 7
    soft_clip: float = 8.0  # of poly attention's scores: c tanh(s / c); 0: not clipped
    window: int = 0  # number of last tokens that a token attends to; 0: all
    gates: bool = False  # each head is multiplied by a Richards curve of x
    alpha: float = 0.5  # initial value for dyt norms, tanh(alpha x)
    experts: int = 8  # of a moe, each `intermediate` wide
    slots: int = 2  # experts per token
    balance: float = 0.01  # factor of the experts' load imbalance in the training loss

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, table in TABLES.items():
            if (name := getattr(self, field)) not in table:
                raise ValueError(f"RichardsConfig: {field}: got {name!r}; {hint(name, table, 'there are')}")
        if self.rope and self.head_dim % 2:
            raise ValueError(f"RichardsConfig: heads are {self.head_dim} wide, and rotation works on pairs; give rope=False.")
        if self.shifted:
            raise ValueError("RichardsConfig: shifted: got True, which only a Decoder has; leave it out.")
        if not self.causal and not all(part.backwards for part in self.parts):
            raise ValueError(
                f"RichardsConfig: causal: got False, but {self.attention} reads a text in one direction; take softmax or poly."
            )
        if not 1 <= self.slots <= self.experts or self.balance < 0:
            raise ValueError(
                f"RichardsConfig: experts, slots and balance: got {self.experts}, {self.slots} and {self.balance}; wanted "
                f"slots from 1 to experts, and a balance of 0 or more."
            )
        if self.degree not in DEGREES or self.soft_clip < 0 or self.window < 0:
            raise ValueError(
                f"RichardsConfig: degree, soft_clip and window: got {self.degree}, {self.soft_clip} and {self.window}; "
                f"wanted a degree of {', '.join(map(str, DEGREES))}, and nothing below 0."
            )
        self._check_options()

    def _check_options(self) -> None:
        """Raise ValueError for an option that the chosen parts would ignore, such as a window of softmax attention."""
        read = {option for part in self.parts for option in part.options}
        known = {option for table in TABLES.values() for part in table.values() for option in part.options}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in known - read and value != field.default:
                chosen = ", ".join(getattr(self, field) for field in TABLES)
                readers = [name for table in TABLES.values() for name, part in table.items() if field.name in part.options]
                raise ValueError(
                    f"RichardsConfig: {field.name}: got {value!r}, but none of {chosen} reads it; it is an "
                    f"option of {' and '.join(readers)}."
                )

    @property
    def parts(self) -> list[NamedPart]:
        return [table[getattr(self, field)] for field, table in TABLES.items()]

    @property
    def embedded(self) -> float:
        """Factor of the embeddings. With a tanh in place of a norm, embeddings of the usual initial size would give the first
        layers inputs near 0; Zhu et al. scale them too."""
        return self.hidden**0.5 if any(part.lifts for part in self.parts) else 1.0

    @property
    def product_parameters(self) -> int:
        """Number of parameters that every token is multiplied by. The embedding is a lookup and does not count."""
        return self.layers * sum(part.products(self) for part in self.parts) + self.vocabulary * self.hidden


class TransformerBlock(Block):
    """Pre-norm block of the parts that the config names."""

    def __init__(self, config: RichardsConfig, device=None, dtype=None) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        mixer, mlp = MIXERS[config.attention].make(config, **where), MLPS[config.mlp].make(config, **where)

        def norm(hidden: int, eps: float, **where: Any) -> nn.Module:
            return NORMS[config.norm].make(config, **where)

        super().__init__(mixer, mlp, config.hidden, config.eps, **where, norm=norm)


class RichardsTrunk(nn.Module):
    """All layers below the head: token ids (B, T) to the last hidden state (B, T, hidden)."""

    def __init__(self, config: RichardsConfig, device=None, dtype=None) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.embed_tokens = embedding(config.vocabulary, config.hidden, **where)
        self.layers = nn.ModuleList(TransformerBlock(config, **where) for _ in range(config.layers))
        self.norm = NORMS[config.norm].make(config, **where)
        self.embedded = config.embedded
        self.rope = RopeTable(RotaryAngles(config.head_dim, config.rope_theta)) if config.rope else None

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Mask = None) -> Tensor:
        x = self.embed(input_ids)
        rope = None if self.rope is None else self.rope.of(x, position_ids)
        return run_blocks(self.layers, self.norm, x, rope, mask)

    def embed(self, input_ids: Tensor) -> Tensor:
        x = look_up(self.embed_tokens, input_ids)
        return x if self.embedded == 1 else x * self.embedded

    def load(self) -> Tensor | None:
        """Return the experts' load imbalance in the last call, averaged over layers, and clear it; None if not recorded."""
        sparse = [block.mlp for block in self.layers if isinstance(block.mlp, MoE)]
        loads = [mlp.load for mlp in sparse if mlp.load is not None]
        for mlp in sparse:
            mlp.load = None
        return torch.stack(loads).mean() if loads else None


class RichardsReader(OwnReader):
    """Reader for the fused kernels, which support some of the parts."""

    KNOWN: ClassVar[dict[str, tuple[str, ...]]] = {"attention": ("softmax",), "mlp": ("swiglu", "moe"), "norm": ("rms",)}

    def refusal(self, max_length: int) -> str | None:
        if why := self.model.undecoded():
            return why
        c = self.config
        if c.head_dim % 2:
            return "its heads have an odd width, and rotation works on pairs"
        unsupported = [getattr(c, field) for field, known in self.KNOWN.items() if getattr(c, field) not in known]
        return f"they have no {' and no '.join(unsupported)}" if unsupported else None

    def mlp(self, block: Any) -> Any:
        if not isinstance(block.mlp, MoE):
            return super().mlp(block)
        (norm, _), sparse = self.norms(block, self.NORMS[2:]), block.mlp
        assert norm is not None
        router = Linear(sparse.router.weight)
        return ExpertWeights(norm, router, sparse.gate_up_proj, sparse.down_proj, sparse.router.slots, normalise=True)

    def routers(self) -> dict[int, nn.Module]:
        return {n: block.mlp.router for n, block in enumerate(self.trunk.layers) if isinstance(block.mlp, MoE)}

    def table(self, attention) -> int | None:
        return 0 if self.config.rope else None


class RichardsDecoder(LanguageModel):
    """`RichardsDecoder(RichardsConfig(...))`. A call gives logits. `loss` never materialises all logits."""

    CONFIG, TRUNK, reader = RichardsConfig, RichardsTrunk, RichardsReader
    runner = "gpubound.models.richards.module_runner"
    config: RichardsConfig

    def undecoded(self) -> str | None:
        return super().undecoded() if self.config.causal else BOTH_DIRECTIONS

    def extra_loss(self) -> Tensor | None:
        load = self.model.load() if self.training else None
        return None if load is None else self.config.balance * load

    def calls(self) -> Iterator[Call]:
        for part in self.config.parts:
            yield from part.calls(self.config)

    def unpacked(self) -> str | None:
        mixer = self.config.attention
        return None if mixer == "softmax" else f"its mixer is {mixer!r}, and only 'softmax' reads their bounds"
