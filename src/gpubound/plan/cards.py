"""The rates that predictions stand on. Those of a GPU were measured on one; those of the links are assumptions, and say so."""

from dataclasses import dataclass, replace

import torch

from .. import measure
from ..device import resolve
from ..errors import MeasureError

TERA, GIGA, GIB = 1e12, 1e9, 1 << 30
ATTENTION = {64: (463 * TERA, 838.0), 128: (618 * TERA, 793.0)}
"""Head width -> (rate, tokens): SDPA's forward and backward reach rate · seq / (seq + tokens), 7 products counted. Within 2 %
of what `gpubound bench blocks --parts poly` measured on an H200 at four lengths, from 1,024 to 8,192."""
REACHED = 0.91  # of the rate of square products, in a whole step of 350m on an H200: 724 of 796 TFLOP/s
HOST_US = 8.0  # of one eager launch, where the card has no figure of its own


@dataclass(frozen=True)
class Card:
    """One kind of GPU."""

    name: str
    memory: int
    """Bytes that torch reports of it."""
    flops: dict[str, float]
    """Precision -> the rate of square products."""
    copy: float
    """Bytes a second, read and written."""
    launch_us: float = HOST_US
    """Host time of one eager launch."""
    node_us: float = 0.91
    """A kernel in a graph: the floor under its cost."""
    source: str = ""

    def products(self, precision: str) -> float:
        """What the products of a step reach."""
        kind = "bf16" if precision.startswith("bf16") else precision
        if kind not in self.flops:
            known = ", ".join(self.flops)
            raise MeasureError(f"plan: no rate of {kind} products is known of {self.name}, only of {known}; take one of them.")
        return REACHED * self.flops[kind]

    def attention(self, head_dim: int, seq: int) -> float:
        """Operations a second of SDPA, forward and backward."""
        rate, half = ATTENTION[64 if head_dim <= 64 else 128]
        return rate * min(1.0, head_dim / 64) * seq / (seq + half) * self.flops["bf16"] / CARDS["h200"].flops["bf16"]

    def about(self) -> str:
        rates = ", ".join(f"{kind} {rate / TERA:,.0f}" for kind, rate in self.flops.items())
        size, copy = f"{self.memory / GIB:.0f} GiB", f"{self.copy / TERA:.2f} TB/s"
        return f"{self.name}: {size}, products {rates} TFLOP/s, copies {copy} ({self.source})"


CARDS = {
    "h200": Card(
        "H200", int(139.8 * GIB), {"bf16": 796 * TERA, "fp16": 796 * TERA, "fp8": 1460 * TERA}, 4.24 * TERA,
        source="measured, benchmarks/results/nvidia-h200.jsonl and LOG.md",
    ),
    "h100": Card(
        "H100 SXM", int(79.1 * GIB), {"bf16": 794 * TERA, "fp16": 794 * TERA, "fp8": 1460 * TERA}, 3.01 * TERA,
        source="measured, benchmarks/results/nvidia-h100-80gb-hbm3.jsonl; fp8 assumed to be the H200's",
    ),
}  # fmt: skip
HERE = "here"


def card_named(name: str) -> Card:
    """One of CARDS, or this machine's GPU, measured now or before."""
    if name == HERE:
        return _here()
    if name not in CARDS:
        raise ValueError(
            f"gpu: got {name!r}, wanted one whose rates were measured: {', '.join(CARDS)}, or {HERE}, which measures this "
            f"machine's; give one of them, and --memory where yours holds more or less."
        )
    return CARDS[name]


def _here() -> Card:
    device = resolve("require")
    found = measure.ceilings(device, quick=True)
    kinds = ("bf16", "fp16", "fp8", "tf32", "fp32")
    flops = {kind: rate for kind in kinds if (rate := getattr(found, f"{kind}_flops_per_s")) is not None}
    memory = torch.cuda.get_device_properties(device).total_memory
    card = Card(found.name, memory, flops, found.copy_bytes_per_s, found.launch_us, source=f"measured here, {found.date}")
    return card if found.graph_node_us is None else replace(card, node_us=found.graph_node_us)


@dataclass(frozen=True)
class Network:
    """How ranks are joined. All of it is assumed until it is measured: what NCCL reaches, not what a link is sold as."""

    nvlink: float = 370 * GIGA
    """Bytes a second that a GPU sends within its node."""
    network: float = 45 * GIGA
    """And to other nodes: nine tenths of one adapter of 400 Gb/s for each GPU."""
    node: int = 8
    """GPUs in a node."""
    step_us: float = 3.0
    """Of one step of a ring, or up and down a tree."""

    def rate(self, world: int) -> float:
        """Bytes a second of a ring through all ranks: it crosses a node's border over all adapters of the node at once."""
        return self.nvlink if world <= self.node else min(self.nvlink, self.network * self.node)

    def about(self, world: int) -> list[str]:
        if world == 1:
            return []
        lines = [f"assumed: a GPU sends {self.nvlink / GIGA:.0f} GB/s within its node (--nvlink)"]
        if world > self.node:
            nodes = -(-world // self.node)
            lines.append(
                f"assumed: {nodes:,} nodes of {self.node} GPUs (--node), {self.network / GIGA:.0f} GB/s a GPU between them "
                f"(--network), all nodes equally far from each other"
            )
        return [*lines, f"assumed: {self.step_us:.0f} us for each step of a ring or tree, and no rank slower than another"]
