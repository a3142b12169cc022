"""Launch plans that a search on a GPU found better than the rules, by compute capability.

A key is (op, way, bucket of the shape, bytes of an element); 0 bytes: any. `python -m benchmarks.tune_norms` and `tune_steps`
print lines as they are here, LOG.md has the figures.
"""

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
    ("product", "qkv", (960, 576), 2): (4, 1024, 4),
    ("product", "add", (576, 576), 2): (1, 1024, 4),
    ("product", "gate_up", (1536, 576), 2): (2, 1024, 8),
    ("product", "add", (576, 1536), 2): (1, 2048, 8),
    ("product", "head", (49152, 576), 2): (16, 1024, 4),
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
    # The same over packed weights: rows a program, words a tile, warps.
    ("packed_product", "int4 qkv", (6144, 4096), 0): (16, 512, 4),
    ("packed_product", "int4 add", (4096, 14336), 0): (8, 256, 2),
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
    # Attention of a decoding step: keys a tile, stages, warps. 350m decodes 2,606 tokens/s, with 1b's plan 2,557; 1b 1,403,
    # with 350m's 1,371. A step of 8b behind 4,096 tokens 4,107 us, of 4,132 by the rule.
    ("decode_attention", "", (4, 32, 4), 2): (128, 2, 4),
    ("decode_attention", "", (4, 32, 8), 2): (64, 2, 8),
    ("decode_attention", "", (4, 64, 8), 2): (32, 3, 4),
}

SEARCHED: dict[int, dict[Key, tuple]] = {90: _HOPPER}
