"""Rates of GPUs, measured on one of each kind, and of the links between them, which are assumptions and printed as such."""

from dataclasses import dataclass, replace

from .. import measure
from ..device import resolve, total_bytes
from ..errors import MeasureError

TERA, GIGA, GIB = 1e12, 1e9, 1 << 30
ATTENTION = {64: (463 * TERA, 838.0), 128: (618 * TERA, 793.0)}
"""Head width -> (rate, tokens): SDPA's forward and backward reach rate · seq / (seq + tokens), 7 products counted. Within 2 %
of bench_blocks on an H200 at four lengths, from 1,024 to 8,192."""
REACHED = 0.91  # of the rate of square products, in a whole step of 350m on an H200: 724 of 796 TFLOP/s
NVLINK = 370 * GIGA  # assumption: bytes a second that a GPU sends within its node
LINK = 50 * GIGA  # assumption: bytes a second between pinned host memory and a GPU, each way (PCIe 5, 16 lanes)
HOP_US = 3.0  # assumption: of one hop around a ring, or along a tree
MOST_GPUS = 8  # of one node; no run on several nodes was measured


@dataclass(frozen=True)
class GpuRates:
    """One kind of GPU."""

    name: str
    memory: int
    """Bytes that torch reports."""
    flops: dict[str, float]
    """Precision -> the rate of square products."""
    copy: float
    """Bytes a second, read plus written."""
    launch_us: float = 8.0
    """Host time of one eager launch."""
    node_us: float = 0.91
    """Device time of a kernel in a graph: the least that it costs."""
    source: str = ""

    def product_rate(self, precision: str) -> float:
        """Return the operations a second that the products of a step reach."""
        kind = "bf16" if precision.startswith("bf16") else precision
        if kind not in self.flops:
            known = ", ".join(self.flops)
            raise MeasureError(f"plan: no rate of {kind} products is known for {self.name}, only {known}; take one of them.")
        return REACHED * self.flops[kind]

    def attention_rate(self, head_dim: int, seq: int) -> float:
        """Return the operations a second of SDPA, forward and backward."""
        rate, half = ATTENTION[64 if head_dim <= 64 else 128]
        return rate * min(1.0, head_dim / 64) * seq / (seq + half) * self.flops["bf16"] / GPUS["h200"].flops["bf16"]

    def __str__(self) -> str:
        rates = ", ".join(f"{kind} {rate / TERA:,.0f}" for kind, rate in self.flops.items())
        size, copy = f"{self.memory / GIB:.0f} GiB", f"{self.copy / TERA:.2f} TB/s"
        return f"{self.name}: {size}, products {rates} TFLOP/s, copies {copy} ({self.source})"


GPUS = {
    "h200": GpuRates(
        "H200", int(139.8 * GIB), {"bf16": 796 * TERA, "fp16": 796 * TERA, "fp8": 1460 * TERA}, 4.24 * TERA,
        source="measured, benchmarks/results/nvidia-h200.jsonl",
    ),
    "h100": GpuRates(
        "H100 SXM", int(79.1 * GIB), {"bf16": 794 * TERA, "fp16": 794 * TERA, "fp8": 1460 * TERA}, 3.01 * TERA,
        source="measured, benchmarks/results/nvidia-h100-80gb-hbm3.jsonl; fp8 assumed to be the H200's",
    ),
}  # fmt: skip
HERE = "here"


def gpu_named(name: str) -> GpuRates:
    """Return one of GPUS, or this machine's GPU, measured now or before."""
    if name in GPUS:
        return GPUS[name]
    if name != HERE:
        raise ValueError(
            f"gpu: got {name!r}, wanted one whose rates were measured: {', '.join(GPUS)}, or {HERE}, which measures this "
            f"machine's; give one of them, and --memory where yours has more or less."
        )
    device = resolve("require")
    limits = measure.ceilings(device, quick=True)
    dtypes = ("bf16", "fp16", "fp8", "tf32", "fp32")
    flops = {dtype: rate for dtype in dtypes if (rate := getattr(limits, f"{dtype}_flops_per_s")) is not None}
    memory = total_bytes(device)
    gpu = GpuRates(
        limits.name, memory, flops, limits.copy_bytes_per_s, limits.launch_us, source=f"measured here, {limits.date}"
    )
    return gpu if limits.graph_node_us is None else replace(gpu, node_us=limits.graph_node_us)
