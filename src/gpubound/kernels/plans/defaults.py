"""Launch plans: those that a search on a GPU found, by compute capability, and the rules of all others.

A key of a searched one is (op, way, bucket of the shape, bytes of an element); 0 bytes: any. `python -m benchmarks.tune_norms`
and `tune_steps` print lines as they are here, LOG.md has the figures.

Rules hold for any shape and GPU. A new op is one more line in RULES.

The ops of a single family are added by its kernels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .types import (
    ADAPTED,
    AttentionPlan,
    Job,
    LatentPlan,
    MatrixPlan,
    Plan,
    ProductPlan,
    ResidentPlan,
    RopePlan,
    RowPlan,
    SplitPlan,
    TilePlan,
    cdiv,
    power_of_two,
)

Key = tuple[str, str, tuple[int, ...], int]

_HOPPER: dict[Key, tuple] = {
    # H200 and H100. Norms, searched in bf16: rows, programs a multiprocessor, warps, stages, hint.
    ("rms_norm", "forward", (1024,), 0): (4, 8, 2, 3, ""),
    ("rms_norm", "forward", (4096,), 0): (1, 0, 4, 1, ""),
    ("rms_norm", "backward", (1024,), 0): (2, 2, 4, 4, ""),
    ("rms_norm", "backward", (2048,), 0): (4, 2, 4, 1, ""),
    ("rms_norm", "backward", (4096,), 0): (2, 1, 8, 3, ""),
    ("rms_norm", "backward", (8192,), 0): (2, 1, 8, 1, ""),
    ("add_rms_norm", "forward", (1024,), 0): (2, 8, 2, 3, ""),
    ("add_rms_norm", "forward", (4096,), 0): (2, 0, 4, 1, ""),
    ("add_rms_norm", "backward", (1024,), 0): (2, 2, 2, 4, ""),
    ("add_rms_norm", "backward", (2048,), 0): (4, 2, 4, 1, ""),
    ("add_rms_norm", "backward", (4096,), 0): (2, 1, 16, 3, ""),
    ("add_rms_norm", "backward", (8192,), 0): (2, 1, 8, 1, ""),
    ("layer_norm", "forward", (1024,), 0): (2, 0, 2, 1, "evict_first"),
    ("layer_norm", "forward", (4096,), 0): (4, 0, 8, 1, ""),
    ("layer_norm", "backward", (1024,), 0): (2, 2, 2, 4, ""),
    ("layer_norm", "backward", (4096,), 0): (2, 1, 8, 3, "evict_first"),
    # Rotary embedding: heads, tokens, warps. 16384 tokens: 25.4 us for 16 + 4 heads of 64 (Liger's, in place, as much), 86.0
    # for 32 + 8 of 128 (Liger's 88).
    ("rope", "", (32,), 0): (8, 2, 2),
    ("rope", "", (64,), 0): (16, 1, 2),
    # Products of a decoding step with 16-bit weights: rows a program, columns a tile, warps. Whole steps: 135m 358 us against
    # 424 by the rule, 350m 399 / 426, 1b 737 / 777, 8b 3,771 / 4,018. Found later by benchmarks/tune_steps.py: 1b 693 / 722,
    # with an adapter 766 / 842.
    # 135m by one warp a program, whose sums wait for no other: a step of one token 360 us of 368, of three 508 of 593.
    ("product", "qkv", (960, 576), 2): (2, 1024, 1),
    ("product", "add", (576, 576), 2): (1, 1024, 4),
    ("product", "gate_up", (1536, 576), 2): (2, 1024, 1),
    ("product", "add", (576, 1536), 2): (1, 2048, 8),
    ("product", "head", (49152, 576), 2): (16, 1024, 4),
    ("product", "head", (16384, 576), 2): (16, 1024, 4),
    ("product", "add", (1024, 1024), 2): (2, 1024, 4),
    ("product", "gate_up", (4096, 1024), 2): (2, 512, 2),
    ("product", "qkv", (3072, 2048), 2): (4, 1024, 4),
    ("product", "add", (2048, 2048), 2): (4, 1024, 8),
    ("product", "gate_up", (8192, 2048), 2): (4, 512, 2),
    ("product", "add", (2048, 8192), 2): (4, 4096, 4),
    ("product", "head", (128256, 2048), 2): (16, 256, 4),
    ("product", "adapted qkv", (3072, 2048), 2): (8, 1024, 2),
    ("product", "adapted add", (2048, 2048), 2): (4, 1024, 2),
    ("product", "adapted add", (2048, 8192), 2): (2, 1024, 4),
    ("product", "qkv", (6144, 4096), 2): (8, 512, 4),
    ("product", "add", (4096, 4096), 2): (4, 512, 2),
    ("product", "gate_up", (14336, 4096), 2): (2, 2048, 4),
    ("product", "add", (4096, 14336), 2): (2, 2048, 4),
    ("product", "head", (128256, 4096), 2): (16, 256, 4),
    # Gemma 4 E4B's and Gemma 3 4B's. Whole steps of 12 layers of E4B: 1,110 us against 1,167, and later 1,093 against 1,102.
    ("product", "add", (2560, 2048), 2): (4, 1024, 4),
    ("product", "qkv", (3072, 2560), 2): (2, 512, 2),
    ("product", "qkv", (2048, 2560), 2): (2, 512, 2),
    ("product", "gate_up", (10240, 2560), 2): (4, 256, 2),
    ("product", "add", (2560, 10240), 2): (2, 1024, 4),
    ("product", "head", (262144, 2560), 2): (16, 256, 4),
    # The same over packed weights: rows a program, words a tile, warps.
    # 8 layers of 8b in int4 and the head 439 us, of 449 by the rule for the output and 8 rows for down.
    ("packed_product", "int4 qkv", (6144, 4096), 0): (16, 512, 4),
    ("packed_product", "int4 add", (4096, 4096), 0): (16, 512, 4),
    ("packed_product", "int4 add", (4096, 14336), 0): (4, 256, 2),
    ("packed_product", "int8 qkv", (6144, 4096), 0): (4, 512, 4),
    ("packed_product", "int8 gate_up", (28672, 4096), 0): (8, 512, 4),
    ("packed_product", "int8 head", (128256, 4096), 0): (16, 256, 2),
    ("packed_product", "fp8 qkv", (6144, 4096), 0): (4, 512, 4),
    ("packed_product", "fp8 add", (4096, 14336), 0): (4, 512, 4),
    # A quarter of a layer of the published DeepSeek-V4-Flash. Whole steps of 12 layers: 1,083 us against 1,230.
    ("product", "qkv", (4160, 4096), 2): (8, 512, 4),
    ("product", "qkv", (2560, 4096), 2): (8, 1024, 4),
    ("product", "qkv", (2048, 4096), 1): (4, 2048, 4),
    ("product", "qkv", (4096, 2048), 1): (16, 512, 4),
    ("product", "qkv", (1280, 4096), 2): (4, 4096, 8),
    ("product", "qkv", (4096, 512), 1): (16, 512, 8),
    ("packed_product", "fp4 routed_gate_up", (512, 4096), 0): (8, 512, 4),
    ("packed_product", "fp4 routed_down", (4096, 512), 0): (16, 64, 1),
    # gpt-oss-20b's four experts, H200, dependent launches with the one that rounds x: 16.8 us, by 16 rows of 64 words 18.1;
    # 9.4, and 11.1 by the rule.
    ("packed_product", "fp4 column_gate_up", (5760, 2880), 0): (4, 128, 1),
    ("packed_product", "fp4 column_down", (2880, 2880), 0): (8, 128, 1),
    # Split products of 1b: rows of weights, columns, warps, parts, stages. Whole steps of 2, 32, 64 and 128 rows, us: 831, 970,
    # 1,137 and 1,264; by the rule 868, 977, 1,153 and 1,317. Attention reads two parts of q, k and v in place of four.
    ("split_product", "", (3072, 2048, 16), 2): (64, 128, 4, 8, 0),
    ("split_product", "", (2048, 2048, 16), 2): (64, 128, 4, 4, 0),
    ("split_product", "", (3072, 2048, 32), 2): (64, 128, 4, 2, 6),
    ("split_product", "", (3072, 2048, 64), 2): (64, 128, 4, 2, 5),
    ("split_product", "", (2048, 2048, 64), 2): (64, 64, 4, 4, 8),
    ("split_product", "", (3072, 2048, 128), 2): (64, 64, 4, 2, 8),
    ("split_product", "", (2048, 8192, 128), 2): (64, 128, 4, 4, 4),
    # Attention of a decoding step: keys a tile, stages, warps. 350m: a step of one row 379 us, with 128 keys 383; before,
    # 2,606 tokens/s, and with 1b's plan 2,557. 1b 1,403. A step of 8b behind 4,096 tokens 4,107 us, of 4,132 by the rule.
    ("decode_attention", "", (4, 32, 4), 2): (64, 2, 4),
    ("decode_attention", "", (4, 32, 8), 2): (64, 2, 8),
    ("decode_attention", "", (4, 64, 8), 2): (32, 3, 4),
}

SEARCHED: dict[int, dict[Key, tuple]] = {90: _HOPPER}


# Rows of a norm's forward tile. H200, 16384 x 4096 bf16: layer_norm takes 68.7 us with two (a copy of it 69.0), 70.2 with one.
TILE_ROWS = 2
WIDEST_TILE = 16384

# Elements that a norm's backward holds. A thread has 64 of each tensor of the tile, half of them if it sums two gradients: so
# compiled for compute capability 9.0, rms_norm takes 250 to 254 of 255 registers and layer_norm 160 to 240, up to a width of
# 8192. More spills. 16384 elements a tile because 256 threads of that kind are all that a multiprocessor's registers serve.
THREAD_ELEMENTS = 64
BACKWARD_TILE = 16384

# Bytes of partial weight gradients of all programs together. They are written and read once more, from the L2 where they
# fit (50 MB on an H200): 1056 programs would make 17 MB each way at width 4096, next to 537 MB of bf16 rows; 4.3 at width 1024.
PARTIAL_BYTES = 10 << 20


def norm_rows(job: Job) -> RowPlan:
    """shape: columns, and how many gradients of that width the backward sums.

    H200, backward at 16384 x 1024 bf16 with the residual's gradient: 4 rows, 8 programs a multiprocessor and 2 warps take 41 us
    (floor 31); 2 rows, 4 programs and 8 warps 104 us; the worst choice tried 856. A thread loads 8 neighbours, so 2 warps lie
    along 512 of the 1024 columns and summing a column over the tile's rows stays inside a thread; 8 warps take two rows.
    """
    cols, sums = job.shape
    block, sums = power_of_two(cols), max(1, sums)
    if job.way == "forward":
        return RowPlan(max(1, min(TILE_ROWS, WIDEST_TILE // block)), 0, max(1, min(16, block // 512)))
    warps = max(1, min(block // 512, 4), min(block // 1024, 16))
    rows = max(1, min(BACKWARD_TILE, THREAD_ELEMENTS * 32 * warps) // sums // block)
    fits = PARTIAL_BYTES // (4 * cols * sums * job.chip.sms)
    return RowPlan(rows, max(1, min(8, fits)), warps)


def gated(job: Job) -> TilePlan:
    """Programs follow each other along a row, so that those which run at the same time read and write neighbouring memory.

    H200, 16384 x 14336 packed: forward 326 us, backward 545, either 103 % of what copying as much takes; plans from 512 to 8192
    elements lie within 1 % of each other.
    """
    return TilePlan(512, 2)


def losses(job: Job) -> TilePlan:
    """shape: words. `elements` are the logits that a program holds at a time.

    H200, 1024 rows of 128256 bf16 logits, loss and gradient: 224 us with 8192 and 8 warps, 251 with 4096, 275 with 2048.
    """
    block = min(8192, power_of_two(job.shape[0]))
    return TilePlan(block, 8 if block > 1024 else 4)


def divergence(job: Job) -> TilePlan:
    """shape: words. A program holds `elements` logits of each of two rows at a time, half as many of each as `losses`.

    No more threads than elements: a second warp that holds the same ones might read a logit after the first has overwritten it.
    """
    block = min(4096, power_of_two(job.shape[0]))
    return TilePlan(block, 8 if block > 1024 else min(4, max(1, block // 32)))


def quantize(job: Job) -> MatrixPlan:
    """128 rows are 128 bytes side by side in the transposed copy, and a thread holds 32 or 64 elements of each tensor."""
    tiles = {"plain": (128, 128, 8), "swiglu": (128, 64, 8), "swiglu_backward": (64, 64, 4)}
    return MatrixPlan(*tiles[job.way])


def rope(job: Job) -> RopePlan:
    """shape: pairs of a head, and the largest number of heads that q, k or v has.

    About 1024 pairs a program, and a warp for every 32 pairs of a head: few warps with many loads in flight each.
    """
    pairs, most = job.shape
    block = power_of_two(pairs)
    return RopePlan(min(power_of_two(most), max(1, 1024 // block)), 1, max(1, min(4, block // 32)))


ROUTERS = 64  # programs over which the few rows of a router are spread
WAVE_BYTES = 1 << 16  # of a weight, that the programs of a multiprocessor hold at a time
LEAST_TILE, MOST_TILE = 512, 2048  # columns: as searched plans of large weights have


def product(job: Job) -> MatrixPlan:
    """shape: rows and columns of the weight, then the rows of its parts that lie apart: no program may span two of them.

    A step of a small model is launches and latency, not bandwidth: a program should ask for all of its weights at once, before
    it waits for x, and one wave of programs should hold the whole weight in registers.

    A weight of several waves is bandwidth, and of columns that fill three quarters of their tiles at most a program loops over
    tiles without a mask. What each program computes of x is shared by more rows then: gate and up of 10,240 x 2,560 issue 4.4
    instructions a weight by 8 rows of 512 columns, and 11.6 by one of 4,096, at 20 us of the 22 that memory takes (counted in
    what Triton 3.9 makes for 9.0).
    """
    rows, columns, *parts = job.shape
    warps, resident = 4, 64  # elements of the tiles a program holds, a thread
    weights = 2 if job.way.endswith("gate_up") else 1
    if job.way.endswith("head"):  # its height is the range of a partial maximum
        return MatrixPlan(16, min(512, power_of_two(columns)), warps)
    tile = min(power_of_two(columns), 4096 if job.bytes <= 2 else 2048)
    even, padded = columns & -columns, -(-columns // tile) * tile
    several = weights * rows * columns * job.bytes > WAVE_BYTES * job.chip.sms and not job.way.startswith(ADAPTED)
    if several and 4 * columns <= 3 * padded and even >= LEAST_TILE:
        tile, resident = min(even, MOST_TILE), 32 * weights
    most = resident * 32 * warps // tile // weights
    if job.way == "router":
        most = min(most, power_of_two(rows) // ROUTERS)
    height = max(1, min(16, most))
    while any(part % height for part in parts) and height > 1 and len(parts) > 1:
        height //= 2
    return MatrixPlan(height, tile, warps)


# A program of `add_routed` reads one expert after the other, so few of them keep too few bytes on their way. H200, six of 64
# experts of 1024 in fp4 into 2048: 256 programs of 8 rows take 13.0 us, 512 of 4 take 8.8, 1024 of 2 take 7.4, 2048 of 1 9.7.
LONE_PROGRAMS = 4  # at least, for each multiprocessor
LANE_WORDS = 4  # of a row of a packed weight that a thread reads at once: 16 bytes
# Words of a tile that a thread holds. Each row of x wants as many registers again for its products.
THREAD_WORDS = {
    "add": 32, "qkv": 32, "gate_up": 64, "head": 64, "routed_gate_up": 32, "add_routed": 32, "routed_down": 16,
    "column_gate_up": 32, "column_down": 16,
}  # fmt: skip


def packed_product(job: Job) -> MatrixPlan:
    """shape: rows and columns of the weight, and the words that hold a row. way: the format and the use, "int4 qkv".

    All warps lie along a row, whatever the number of rows, so that its sum is added up in one order in any batch.
    """
    words = job.shape[2]
    warps = min(4, power_of_two(-(-words // (32 * LANE_WORDS))))
    while words % (32 * LANE_WORDS * warps) and warps > 1:
        warps //= 2
    use = job.way.split()[1]
    columns = min(32 * LANE_WORDS * warps, max(32, power_of_two(words)))  # of a short row, lanes have several
    height = THREAD_WORDS[use] * 32 * warps // columns
    while use == "add_routed" and height > 2 and job.shape[0] < LONE_PROGRAMS * height * job.chip.sms:
        height //= 2
    return MatrixPlan(height, columns, warps)


def decode_attention(job: Job) -> AttentionPlan:
    """shape: query heads that share a head of keys, half of a head, heads of keys, and the bytes of what is multiplied.

    Of several rows, in parts of 512 keys where there are 8 heads of keys, and 256 where there are 4 (decode/layer.py), whole
    steps by tiles of 32 keys and 64, us on an H200: 1b with 32 and 64 rows behind 160 tokens 943, 946 and 1,055, 1,076, behind
    2,300 1,623, 1,610 and 2,352, 2,312; by the plan of a single row, with 8 warps, 977, 1,153, 2,184 and 3,594. 350m with 16
    and 64 rows 559, 511 and 784, 740. 8b's are within 1 %.

    By query, 12 layers of Gemma 4 E4B behind 150 tokens, us a step: 1,119 by 16 keys and 2 warps, 1,128 by 4 warps, 1,125 by 32
    keys and 4 warps, 1,146 by 64 and 8; on tensor cores 1,126 by 32 keys and 8 warps.

    Where rows fill the GPU without a split ("many"), a program's wait for its first keys is a fixed cost, and many programs
    of one warp hide it. 256 rows of a 0.6b model, a layer at 20, 300 and 600 keys on an H200: 32, 112 and 187 us by 64 keys
    and 4 warps; 20, 92 and 168 by 32 keys and 2 warps; 15, 84 and 153, which is 4.1 TB/s, by 16 keys and one warp.

    Compiled for 9.0: heads wider than 256 spill 900 bytes a thread by 64 keys and 4 warps, none by 16 and 8. Heads of 256 spill
    48 where keys are asked for early, and else take 2,544 instructions a thread and 141 kB; by 32 keys and 8 warps 1,544, 75.
    """
    if job.way == "by query":
        return AttentionPlan(16, 1, 2 if job.shape[1] <= 128 else 4)
    if job.shape[1] > 128:
        return AttentionPlan(16, 3, 8)
    if job.shape[1] > 64 and job.way != "many":
        return AttentionPlan(32, 3, 8)
    if job.way == "several" and job.bytes == 2 and job.shape[2] >= 8:
        return AttentionPlan(32, 3, 2)
    many = job.way == "many" and job.bytes == 2 and job.shape[1] <= 64
    return AttentionPlan(16, 3, 1) if many else AttentionPlan(64, 3, 4)


def latent_attention(job: Job) -> LatentPlan:
    """shape: heads, and the widths of a latent and of a key's rotated part.

    Heads of one program share its loads. With 64 of them the kernel spills (compiled for 9.0, latents of 512).
    """
    if job.bytes > 2:
        return LatentPlan(16, 16, 1, 8)
    heads = min(32, max(16, power_of_two(job.shape[0])))
    return LatentPlan(heads, 32, 3, heads // 4)


LARGE = 1 << 24  # elements of a result from which tiles of 128 x 256 are many waves
WAVE = 1 << 22  # from which they are one


def lora(job: Job) -> ProductPlan:
    """shape: rows; columns of x (down), of y (up, the product's forms), of x and g together (gradients); the ranks of a tile.

    down and gradients are bound by memory. Gradients' programs share a sum where their tiles are fewer than the GPU's
    multiprocessors: 2048 rows, 768 + 768 columns, rank 16, bf16 on an H200: 4.8 us by four, 8.1 with tiles of 16 columns.

    described, H200, bf16: 8192 x 2048 x 8192 376 us (cuBLAS without the adapter 362), 2048 x 2048 x 2048 25.2 (23.5), and 26.5
    with tiles of 128 x 128; 2048 x 768 x 768 7.9 (6.3).
    """
    rows, columns, rank = job.shape
    if job.way == "up":
        return ProductPlan(64, 128, rank, 4, 1)
    if job.way == "pointers":
        return ProductPlan(64, 128, 64, 4, 4)
    if job.way == "described":
        return ProductPlan(128, 256, 64, 8, 3, 2) if rows * columns >= WAVE else ProductPlan(128, 128, 64, 8, 3)
    if job.way == "gradients":
        splits = 1 if columns >= 64 * (job.chip.sms * 7 // 8) else 4
        return ProductPlan(64, rank, (128 if rank <= 32 else 64) * 2 // max(2, job.bytes), 4, 3, 1, splits)
    return ProductPlan(64, rank, 256 // max(2, job.bytes), 4, 3)


HELD_BYTES, AHEAD_BYTES = 1 << 14, 6 << 10  # of weights and of x, that a warp has in registers: 128 and 48 of a thread's


def tiled_product(job: Job) -> ResidentPlan:
    """shape: rows of all weights, their width, and rows of x, up to a power of two; "normed" where there is a gain.

    A step waits for each product's few rows, so what counts is the way from x to the sum: few warps, whose sums meet once.
    H200, a step of 5 tokens of 135m, us: 454 by 4 warps; gate and up by 16 rows and 2 warps 440 (8 warps 510), then q k v 417,
    then the output 409.
    """
    outputs, width, tall = job.shape
    rows, warps = 32 if outputs >= 1536 and 1024 <= width <= 2048 else 16, 8 if width > 2048 else 4 if width > 640 else 2
    slices, size = cdiv(width, 32 * warps), 32 * max(2, job.bytes)
    weight_slices, input_slices = max(1, HELD_BYTES // (rows * size)), max(1, AHEAD_BYTES // (tall * size))
    return ResidentPlan(rows, warps, min(slices, weight_slices), min(slices, input_slices))


def split_product(job: Job) -> SplitPlan:
    """shape: rows of all weights, their width, and rows of x, up to a power of two; "gated": the sums have one part.

    H200, us of a norm and a product in a chain, and of cuBLAS: 350m with 32 rows, q k v 3.0 (6.4), output 3.4 (6.1), gate and
    up 7.2 (10.2), down 4.5 (9.8), and 5.3 where its weights are not all asked for at once; with 128 rows 5.0 (6.9), 5.0 (6.5),
    8.4 (11.3), 7.2 (10.5). 1b with 128 rows, gate and up 22.6 by 128 rows of weights, 26.5 by 64 (26.7).
    """
    outputs, width, tall = job.shape
    most = 1 if job.way == "gated" else min(8, job.chip.sms * 3 // 2 // cdiv(outputs, 64))
    parts = next((n for n in range(most, 1, -1) if width % (64 * n) == 0 and width >= 192 * n), 1)
    each, gated = width // parts, job.way == "gated"
    long = tall <= 32 or (tall == 64 and gated)
    columns = max(16, min(128 if long and each % 128 == 0 else 64, power_of_two(width)) * 2 // max(2, job.bytes))
    if tall > 64 and gated and outputs >= 96 * job.chip.sms:
        return SplitPlan(128, columns, 8, 1, 5)
    resident = tall <= 32 and each <= (512 if outputs <= 1024 else 256)
    return SplitPlan(64, columns, 4, parts, 0 if resident else 6 if not long else 3 if tall == 64 else 4)


class Rule(NamedTuple):
    """Rule that gives an op its plans."""

    kind: Any  # the class of its plans
    plan: Callable[[Job], Plan]
    bucket: Callable[[Job], tuple[int, ...]]  # a searched plan holds for all shapes with this in common


def width(job: Job) -> tuple[int, ...]:
    return (power_of_two(job.shape[0]),)


def first(count: int) -> Callable[[Job], tuple[int, ...]]:
    return lambda job: job.shape[:count]


RULES = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm"), Rule(RowPlan, norm_rows, width)),
    "decode_attention": Rule(AttentionPlan, decode_attention, first(3)),
    "divergence": Rule(TilePlan, divergence, width),
    "gated": Rule(TilePlan, gated, first(0)),
    "group_norm": Rule(TilePlan, lambda job: TilePlan(8192, 4), first(0)),
    "latent_attention": Rule(LatentPlan, latent_attention, lambda job: job.shape),
    "latent_product": Rule(MatrixPlan, lambda job: MatrixPlan(16, 64 if job.bytes == 2 else 32, 4), lambda job: job.shape),
    "lora": Rule(ProductPlan, lora, lambda job: job.shape),
    "losses": Rule(TilePlan, losses, width),
    "packed_product": Rule(MatrixPlan, packed_product, first(2)),
    "product": Rule(MatrixPlan, product, first(2)),
    "quantize": Rule(MatrixPlan, quantize, first(0)),
    "rope": Rule(RopePlan, rope, first(1)),
    "clamped_glu": Rule(TilePlan, lambda job: TilePlan(1024, 4), first(0)),
    "split_product": Rule(SplitPlan, split_product, lambda job: job.shape),
    "swiglu_backward": Rule(TilePlan, lambda job: TilePlan(1024, 4), first(0)),
    "tiled_product": Rule(ResidentPlan, tiled_product, lambda job: job.shape),
}
