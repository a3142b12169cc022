"""Configuration of a training step: model, precision, micro-batches, GPUs.

Rates of GPUs are measured on one of each kind; those of the links between them are assumptions and printed as such.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .. import measure
from ..device import resolve, total_bytes
from ..errors import MeasureError
from ..formatting import quantity
from ..lora.base import FORMATS, suited
from ..lora.layers import adapted_layers, names_in
from ..measure import train_flops_per_token
from ..models.llama.decoder import Decoder, DecoderConfig
from ..models.registry import family_of, is_named
from ..models.storing import Held, stored_weights
from ..train.accumulate import FlatLayout, counted
from ..train.adamw import AdamW, Muon, count_by_rule
from ..train.adapters import check_published, published_scheme
from ..train.fields import Lora
from ..train.offload import parse as parse_recompute
from ..train.precision import Precision, precision as precision_named
from ..train.recipe import Recipe, check_model

META = torch.device("meta")
PRODUCTS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""The layers of a block that are multiplied together."""


def layer_shapes(c: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each linear layer of a block."""
    h, f, q, kv = c.hidden, c.intermediate, c.heads * c.head_dim, c.kv_heads * c.head_dim
    return {
        "q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h),
        "gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h),
    }  # fmt: skip


@dataclass(frozen=True)
class AdapterSizes:
    """Low-rank adapters over frozen linear layers. Sizes are those of one block."""

    rank: int
    base: str | None
    """Format of the frozen layers, in words where the folder is quantised; None: the step's own precision."""
    ranks: dict[str, int]
    """Linear layer -> the rank of its adapter, or 0."""
    frozen_bytes: int
    """Weights as they are stored; fsdp shards them."""
    scale_bytes: int
    """Scales of quantised weights, which every rank has."""
    published: bool = False
    """True when the folder's weights are quantised, and read unchanged."""


@dataclass(frozen=True)
class StepConfig:
    """A step. `rows` is the size of a micro-batch, `accumulate` the micro-batches of one rank."""

    config: DecoderConfig
    block_parameters: int
    other_parameters: int
    """Those of the embedding, the head and the last norm."""
    muon_parameters: int
    """Those that Muon updates, where it is the optimizer."""
    optimizer: AdamW | Muon
    precision: str
    seq: int
    rows: int
    accumulate: int
    recompute: str = "cheap"
    captured: bool = True
    average: bool = False
    """True with a moving average of the weights."""
    world: int = 1
    sharded: bool = False
    """fsdp: every rank has its shard of the weights. Otherwise ddp: every rank has all of them."""
    sum_once: bool = False
    """Sharded: sum gradients over the ranks once a step instead of once a micro-batch, with full gradients until then."""
    adapters: AdapterSizes | None = None
    in_backward: bool = False
    """True when each block is updated within backward: gradients of one block, and of one matrix outside of blocks."""
    offload: bool = False
    """True when moments and masters are in host memory."""

    @cached_property
    def numbers(self) -> Precision:
        return precision_named(self.precision)

    @property
    def itemsize(self) -> int:
        return self.numbers.dtype.itemsize

    @property
    def parameters(self) -> int:
        return self.config.layers * self.block_parameters + self.other_parameters

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.seq

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks."""
        return self.tokens * self.accumulate * self.world

    @property
    def recomputed(self) -> int:
        """Number of blocks that save nothing but their input."""
        way, count = parse_recompute(self.recompute)
        return {"blocks": self.config.layers, "count": count}.get(way, 0)

    @property
    def fp8_base(self) -> bool:
        """True when frozen layers are multiplied in fp8, as a GPU does for bf16 inputs."""
        return self.adapters is not None and self.adapters.base == "fp8" and self.precision.startswith("bf16")

    @property
    def trained(self) -> int:
        """Parameters that an update changes."""
        if self.adapters is None:
            return self.parameters
        shapes = layer_shapes(self.config)
        return self.config.layers * sum(rank * sum(shapes[name]) for name, rank in self.adapters.ranks.items())

    @property
    def layout(self) -> FlatLayout:
        """The flat buffers of one rank, but for the few bytes between two parameters."""
        if self.adapters is not None:
            return counted(self.numbers.dtype, self.trained)
        parts = self.world if self.sharded else 1
        by_adamw = -(-(self.parameters - self.muon_parameters) // parts)
        dtype = torch.float32 if self.sharded else self.numbers.dtype  # shards are their own masters
        return counted(dtype, by_adamw, -(-self.muon_parameters // parts))

    @property
    def flops_per_token(self) -> int:
        """Operations without any recomputation. No gradient of a frozen weight is computed."""
        c = self.config
        flops = train_flops_per_token(c.product_parameters, c.layers, c.heads * c.head_dim, self.seq)
        return flops if self.adapters is None else flops - 2 * c.product_parameters + 6 * self.trained

    def __str__(self) -> str:
        if self.adapters is None:
            return f"{quantity(self.trained)} parameters, {self.precision}"
        frozen = f"{quantity(self.parameters)} parameters frozen in {self.adapters.base or self.precision}"
        return f"{frozen}, {quantity(self.trained)} in adapters of rank {self.adapters.rank}, {self.precision}"


def step_of(recipe: Recipe, world: int = 1) -> StepConfig:
    """Return the recipe's step on `world` GPUs. Of a model folder only config.json is read."""
    if recipe.objective != "next_token":
        raise ValueError(f"plan: objective: got {recipe.objective}, wanted next_token, whose activations are counted.")
    if recipe.phases:
        names = ", ".join(name for name, _ in recipe.stages())
        raise ValueError(f"plan: phases: got {names}, wanted a recipe without; plan each phase by its own options.")
    rows = recipe.micro_batch * recipe.accumulate
    if rows % world:
        even = world // math.gcd(world, recipe.micro_batch)
        raise ValueError(
            f"plan: a step has {rows:,} rows (micro_batch {recipe.micro_batch} x accumulate {recipe.accumulate}), wanted a "
            f"multiple of the {world:,} GPUs that share them; give --accumulate {-(-recipe.accumulate // even) * even}."
        )
    per_rank = rows // world
    micro = max(n for n in range(1, min(recipe.micro_batch, per_rank) + 1) if per_rank % n == 0)
    model, precision = model_of(recipe), recipe.precision if recipe.precision != "auto" else "bf16"
    way, count = parse_recompute(recipe.recompute)
    if way == "count" and count > model.config.layers:
        raise ValueError(f"recompute: got {count} blocks, the model has {model.config.layers}; give at most so many.")
    folder = "" if is_named(recipe.model) else recipe.model
    if folder:
        check_published(folder, recipe.adapters)
    return outlined(
        model, recipe.numbers, precision, recipe.seq, micro, per_rank // micro,
        recompute=recipe.recompute, captured=recipe.graph != "off", average=bool(recipe.ema),
        world=world, sharded=recipe.parallel == "fsdp" and world > 1, lora=recipe.adapters,
        in_backward=recipe.update_in_backward, offload=recipe.offload_optimizer, folder=folder,
    )  # fmt: skip


def model_of(recipe: Recipe) -> Decoder:
    """Return the model on the meta device: no memory, no weights."""
    check_model(recipe.model)
    family = family_of(recipe.model)
    named = is_named(recipe.model)
    model = family.make(recipe.model, recipe.vocabulary, recipe.seq, META) if named else family.outline(recipe.model)
    if type(model) is not Decoder:
        raise ValueError(
            f"plan: model: got {recipe.model}, a {type(model).__name__}, wanted one that our Llama-shaped Decoder computes; "
            f"the activations of other models are not counted."
        )
    return model


def outlined(
    model: Decoder, optimizer: AdamW | Muon, precision: str, seq: int, rows: int, accumulate: int = 1,
    lora: Lora | None = None, folder: str = "", **options,
) -> StepConfig:  # fmt: skip
    """Return the step of a model on any device, to which the adapters of `lora` are added. `folder` has its weights, which may
    be quantised."""
    by_adamw, by_muon = count_by_rule(model, optimizer)  # a tied table is one parameter
    in_block = sum(p.numel() for p in model.model.layers[0].parameters())
    other = by_adamw + by_muon - model.config.layers * in_block
    if lora is not None:
        options["adapters"] = adapters_of(model, lora, precision_named(precision).dtype, folder)
    return StepConfig(model.config, in_block, other, by_muon, optimizer, precision, seq, rows, accumulate, **options)


def adapters_of(model: Decoder, lora: Lora, dtype: torch.dtype, folder: str = "") -> AdapterSizes:
    """Return the sizes of a block's adapters and frozen weights; of a quantised folder, the mean of all blocks. `model` is on
    the meta device; the adapters are added."""
    for name in ("dora", "dropout"):
        if getattr(lora, name):
            raise ValueError(f"plan: lora: got {name}, whose cost is not counted, wanted none; leave {name} out to plan.")
    weights = {name: p for name, p in model.named_parameters() if name.startswith("model.layers.0.")}
    quantised = set() if lora.base is None else set(suited(model, FORMATS[lora.base]))
    scheme = published_scheme(folder) if folder else None
    if scheme is not None:
        published = stored_weights(model, scheme, dtype)
        in_blocks = {name: p for name, p in model.named_parameters() if name.startswith("model.layers.")}
        stored = [published.get(n.removesuffix(".weight"), Held(dtype.itemsize * p.numel(), 0)) for n, p in in_blocks.items()]
    lora.check_model(model)
    layer_ranks = {name: sum(layer.r[word] for word in names_in(layer)) for name, layer in adapted_layers(model)}
    blocks = [
        {name.rpartition(".")[2]: rank for name, rank in layer_ranks.items() if name.startswith(f"model.layers.{i}.")}
        for i in range(model.config.layers)
    ]
    if any(block != blocks[0] for block in blocks) or len(layer_ranks) != sum(map(len, blocks)):
        raise ValueError(
            "plan: lora: targets: wanted linear layers of blocks, the same in each, because one block is counted and "
            "multiplied; name them by the ends of their names, such as q_proj."
        )
    ranks = {name: blocks[0].get(name, 0) for names in PRODUCTS for name in names}
    if scheme is not None:
        frozen, scales = (sum(sizes) // model.config.layers for sizes in zip(*stored))
        return AdapterSizes(lora.rank, scheme.name, ranks, frozen, scales, published=True)
    frozen = scales = 0
    for name, parameter in weights.items():
        weight = parameter.detach().to(dtype)
        if name.removesuffix(".weight") in quantised:
            codes, others = FORMATS[str(lora.base)].encode(weight)
            frozen, scales = frozen + codes.nbytes, scales + sum(t.nbytes for t in others.values() if t is not codes)
        else:
            frozen += weight.nbytes
    return AdapterSizes(lora.rank, lora.base, ranks, frozen, scales)


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
