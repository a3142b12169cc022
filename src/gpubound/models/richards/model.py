"""A language model of any parts: {softmax, ...} attention, {swiglu, ...} MLP, {rms, ...} norm, causal or not, told the time or
not. The parts of a config are named in parts.py; children are named as Hugging Face names them.

Legend: B batch, T tokens.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...kernels.dispatch import Call
from ...layers.attention import RopeTable, RotaryAngles
from ...layers.block import run_block, run_blocks
from ...layers.embedding_and_head import look_up
from ...layers.moe import MoE
from ..decoding import ExpertWeights, Linear
from ..llama.decoder import OwnReader
from ..own import LanguageModel
from .blocks import DiffusionBlock, TimeEmbedding, TransformerBlock, run_at_time
from .cached import CachedModel
from .config import RichardsConfig
from .parts import NORMS


class RichardsTrunk(nn.Module):
    """Everything below the head: token ids (B, T) to the last hidden state (B, T, hidden)."""

    def __init__(self, config: RichardsConfig, device=None, dtype=None) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden, **where)
        self.time = TimeEmbedding(config.hidden, **where) if config.time == "film" else None
        block = TransformerBlock if self.time is None else DiffusionBlock
        self.layers = nn.ModuleList(block(config, **where) for _ in range(config.layers))
        self.norm = NORMS[config.norm].make(config, **where)
        self.embedded = config.embedded
        self.rope = RopeTable(RotaryAngles(config.head_dim, config.rope_theta)) if config.rope else None

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None, time: Tensor | None = None
    ) -> Tensor:
        return self.run(self.embed(input_ids), position_ids, mask, time)

    def run(
        self, x: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None, time: Tensor | None = None
    ) -> Tensor:
        """What `forward` does with embedded tokens, or with any other x (B, T, hidden)."""
        rope = None if self.rope is None else self.rope.of(x, position_ids)
        return run_blocks(self.layers, self.norm, x, rope, mask, self._step(x, time))

    def embed(self, input_ids: Tensor) -> Tensor:
        x = look_up(self.embed_tokens, input_ids)
        return x if self.embedded == 1 else x * self.embedded

    def load(self) -> Tensor | None:
        """How uneven the experts' load was in the last call, the mean over layers; None where nobody asked. Told once."""
        sparse = [block.mlp for block in self.layers if isinstance(block.mlp, MoE)]
        loads = [mlp.load for mlp in sparse if mlp.load is not None]
        for mlp in sparse:
            mlp.load = None
        return torch.stack(loads).mean() if loads else None

    def _step(self, x: Tensor, time: Tensor | None):
        if (time is None) != (self.time is None):
            wanted = "this model is not told the time" if self.time is None else f"wanted times from 0 to 1, ({x.shape[0]},)"
            raise ValueError(f"RichardsDecoder: time: got {'none' if time is None else 'some'}; {wanted}.")
        if time is None or self.time is None:
            return run_block
        if time.shape != x.shape[:1]:
            raise ValueError(f"RichardsDecoder: time: got shape {tuple(time.shape)}, wanted one a row, ({x.shape[0]},).")
        return partial(run_at_time, time=self.time(time))


class RichardsReader(OwnReader):
    """How the fused kernels decode it, where they know its parts."""

    KNOWN: ClassVar[dict[str, tuple[str, ...]]] = {"attention": ("softmax",), "mlp": ("swiglu", "moe"), "norm": ("rms",)}

    def refusal(self, max_length: int) -> str | None:
        if why := self.model.undecoded():
            return why
        c = self.config
        if c.head_dim % 2:
            return "its heads have an odd width, and rotation works on pairs"
        strange = [getattr(c, field) for field, known in self.KNOWN.items() if getattr(c, field) not in known]
        return f"they have no {' and no '.join(strange)}" if strange else None

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
    """`RichardsDecoder(RichardsConfig(...))`. A call gives logits. `loss` never holds the whole logits."""

    reader = RichardsReader
    runner = "gpubound.models.richards.module_runner"
    config: RichardsConfig

    def __init__(self, config: RichardsConfig, device=None, dtype=None) -> None:
        if not isinstance(config, RichardsConfig):
            raise ValueError(f"RichardsDecoder: config: got {type(config).__name__}, wanted a RichardsConfig.")
        super().__init__(config, RichardsTrunk(config, device, dtype), device, dtype)

    @torch.no_grad()
    def initialise(self, std: float = 0.02) -> None:
        """Draw weights as every language model does, those that read the time with a deviation of 1 / √inputs.

        With 0.02, as all other weights have, an untrained model 64 wide changes by 3e-6 between the times 0.1 and 0.9; so it
        changes by 6e-4.
        """
        super().initialise(std)
        if self.model.time is not None:
            for layer in (self.model.time.inner, self.model.time.outer, *(block.film for block in self.model.layers)):
                layer.weight.normal_(0.0, layer.in_features**-0.5)

    def cached(self, rows: int, places: int) -> CachedModel:
        return CachedModel(self, rows, places)

    def undecoded(self) -> str | None:
        if not self.config.causal:
            return "its tokens see what comes behind them (causal=False)"
        return "its blocks are told a time" if self.config.time != "none" else None

    def extra_loss(self) -> Tensor | None:
        load = self.model.load() if self.training else None
        return None if load is None else self.config.balance * load

    def calls(self) -> Iterator[Call]:
        for part in self.config.parts:
            yield from part.calls(self.config)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None, time: Tensor | None = None
    ) -> Tensor:
        """Logits (B, T, vocabulary). Attention is as the config's `causal` says, or `mask` (an SDPA mask). `time` (B,), from 0
        to 1, is for models that are told one."""
        return self.lm_head(self.model(input_ids, position_ids, mask, time))
