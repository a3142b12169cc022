"""One way to run a training step: which model, in which numbers, cut into which micro-batches, shared by how many GPUs."""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..measure import train_flops_per_token
from ..models.llama.decoder import DecoderConfig
from ..train.flat_buffers import FlatLayout, counted
from ..train.muon import Muon
from ..train.optimizer import AdamW
from ..train.precision import Precision, precision as precision_named
from ..train.recompute import parse as parse_recompute
from ..words import quantity


@dataclass(frozen=True)
class Outline:
    """What a plan must know of a model: its config, and how many parameters lie where."""

    config: DecoderConfig
    in_block: int
    """Parameters of one block."""
    outside: int
    """Those of the embedding, the head and the last norm."""
    by_muon: int
    """Those that Muon updates, where it is the optimizer."""

    @property
    def parameters(self) -> int:
        return self.config.layers * self.in_block + self.outside


@dataclass(frozen=True)
class Setting:
    """A step as it would run. `rows` is a micro-batch, `accumulate` how many of them one rank runs in a step."""

    outline: Outline
    optimizer: AdamW | Muon
    precision: str
    seq: int
    rows: int
    accumulate: int
    recompute: str = "cheap"
    captured: bool = True
    average: bool = False
    """Whether a moving average of the weights is kept."""
    world: int = 1
    sharded: bool = False
    """fsdp: every rank holds its part of the weights. Without it, ddp: every rank holds all."""
    once: bool = False
    """Sharded: whether gradients are summed over the ranks once a step, and until then every rank holds whole ones."""

    @property
    def config(self) -> DecoderConfig:
        return self.outline.config

    @cached_property
    def numbers(self) -> Precision:
        return precision_named(self.precision)

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.rows * self.seq

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.tokens * self.accumulate * self.world

    @property
    def trained(self) -> int:
        """Parameters that an update moves."""
        return self.outline.parameters

    @property
    def flops_per_token(self) -> int:
        """What a token costs whoever computes nothing twice."""
        c = self.config
        return train_flops_per_token(c.product_parameters, c.layers, c.heads * c.head_dim, self.seq)

    @property
    def assumed(self) -> list[str]:
        """What its figures stand on beside what all do."""
        return []

    def __str__(self) -> str:
        """What trains, and in which numbers."""
        return f"{quantity(self.trained)} parameters, {self.precision}"

    @property
    def recomputed(self) -> int:
        """How many blocks keep their input alone."""
        way, count = parse_recompute(self.recompute)
        return {"blocks": self.config.layers, "count": count}.get(way, 0)

    @property
    def parts(self) -> int:
        """Into how many parts weights and what belongs to them are cut."""
        return self.world if self.sharded else 1

    @property
    def layout(self) -> FlatLayout:
        """The flat buffers of one rank, but for the few bytes between two parameters."""
        of_muon = -(-self.outline.by_muon // self.parts)
        of_adamw = -(-(self.outline.parameters - self.outline.by_muon) // self.parts)
        dtype = torch.float32 if self.sharded else self.numbers.dtype  # shards are their own masters
        return counted(dtype, of_adamw, of_muon)
