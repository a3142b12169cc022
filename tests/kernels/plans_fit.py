"""Compile every kernel with the plans it gets on every GPU since Ampere, without any of them, and hold it against their limits.

    make plans

The shared memory of each kernel is kept in plans_fit.json by a hash of its code, its constants and the compiler, so that a run
compiles new kernels alone. The hash ignores docstrings, comments, line numbers and module names. The exit code is 1 when a
kernel does not compile or asks for more shared memory than the GPU has.
"""

import ast
import hashlib
import json
import sys
import warnings
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

# compute capability -> bytes of shared memory that a program may ask for: A100; RTX 30; RTX 40, L4; H100, H200; B200; RTX 50
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
DTYPES = (torch.float32, torch.bfloat16)  # fp16 takes bf16's plans and as many bytes
KEPT = Path(__file__).with_name("plans_fit.json")

NORMS = [(cols,) for cols in (1024, 2048, 4096, 8192)]
STILL = [*NORMS, (2048, True)]  # a gain that does not train
# Shapes that an op's example takes, where its plan or its kernel depends on them; all other ops are compiled once a dtype.
SHAPES: dict[str, list[tuple]] = {
    "activate_rows": [(), ("relu",), ("relu2",), ("silu",), ("gelu",)],
    "add_adapters": [(16, True), (256, False)],
    "add_dynamic_tanh": NORMS,
    "add_rms_norm": [*STILL, (1024, False, torch.bfloat16)],
    "choose_experts": [(), (True,)],
    "chunk_scan": [(True, 128, 128, 64, False), (True, 128, 128, 64, True), (False, 256, 64, 64, False)],
    "compress": [(1,), (2, 2)],
    "cross_entropy": [(40, True, True), (8208, False, False)],
    "add_norm": [(), (1.0,)],
    "add_product": [(), (16, True), (256, False)],
    "decode_attention": [
        (8, 4, 64),
        (8, 4, 128),
        (4, 2, 256),
        (4, 2, 256, 128, False, 1.0, 50.0),
        (8, 1, 128, 48, True, 0.0, 0.0),
        (2, 16, 128, 32, False, 0.0, 0.0, True, False),
        (8, 8, 64, 32, False, 0.0, 0.0, False, True),
        (4, 4, 256, 32, False, 1.0, 0.0, False, False, True),
        (2, 4, 256, 128, False, 0.0, 0.0, False, False, False, 2, 1e-6),
        (2, 4, 256, 128, False, 0.0, 0.0, False, False, False, 0, 0.0),
        (4, 8, 512, 256, False, 0.0, 0.0, False, False, False, 1, 1e-6),
        (8, 2, 128, 64, False, 0.0, 0.0, False, False, False, 2, 0.0, True),
        (4, 4, 64, 32, False, 0.0, 0.0, False, False, False, 2, 0.0, False, True),
        (2, 4, 256, 128, False, 0.0, 0.0, False, False, False, 2, 1e-6, False, False, True),
        (2, 4, 512, 64, False, 0.0, 0.0, False, False, False, 0, 0.0, False, False, True),
    ],
    "delta_step": [(16, 32, 128, 128, False, 4), (16, 32, 128, 128, True, 4, True)],
    "divergence": [(8208, 1.0, beta, 1.0, True, True) for beta in (0.0, 0.5, 1.0)] + [(8208, 0.5, 0.5, 2.0, True, True)],
    "dynamic_tanh": NORMS,
    "geglu": [(72, False)],
    "hc_pre": [(), (4, True)],
    "hc_write": [(), (4, True, 6), (4, True, 0, True)],
    "invariant_attention": [(64,), (128,), (256,)],
    "invariant_cached_attention": [(64,), (128,), (256,), (128, True)],
    "invariant_linear": [(), (40_960, 1032)],
    "latent_attention": [(16, 128, 128, 512, 32), (128, 128, 128, 512, 32)],
    "latent_queries": [(16, 128, 128, 512, 32), (20, 192, 256, 512, 32, False)],
    "layer_norm": NORMS,
    "layer_norm_rows": [(), (False, 0.0)],
    "linear_cross_entropy": [(8208, False, False), (8208, False, False, True, True)],
    "lora_down": [(16, False), (32, True), (64, False), (130, False), (128, False, True), (16, False, False, 3, False)],
    "lora_gradients": [
        (768, 768, 16, False),
        (2048, 2048, 32, True),
        (4096, 4096, 64, False),
        (4096, 4096, 130, False),
        (2048, 3072, 16, False, 3),
        (2048, 2048, 128, False, 1, True),
        (768, 768, 16, False, 1, False, True),
        (2048, 2048, 64, True, 1, True, True),
    ],
    "lora_product": [
        (0, 16, False, True),
        (0, 16, False, False),
        (1, 16, False, True),
        (2, 64, False, True),
        (2, 130, False, False),
        (2, 16, False, True, 3),
        (2, 16, False, True, 3, False),
        (2, 48, False, False, 1, False),
        (2, 128, False, True, 1, False, 16, 8),
        (2, 384, False, False, 1, False, 16, 8),
        (2, 128, False, True, 1, False, 64, 2),
    ],
    "lora_up": [(16, False), (64, True), (130, False), (16, False, 2)],
    "mamba_step": [(128, 64, 1, 128, 4, True), (128, 64, 8, 256, 4, True, True)],
    "norm_gate_up": [(), (1.0, "gelu_tanh"), (None, "silu"), (0.0, "silu", 16, True)],
    "norm_product": [
        (),
        (1.0, 30.0),
        (None, 0.0),
        (0.0, 0.0, 16, True),
        (None, 0.0, 256, False),
        (None, 0.0, 0, True, "relu2", False),
        (None, 0.0, 0, True, "gelu_tanh", True),
    ],
    "norm_products": [(), (1.0,), (None,), (0.0, True, True), (None, True, False)],
    "norm_rows": [(), (1.0,), (0.0, True), (0.0, False, 4)],
    "poly_attention": [(8, 64, 8, 3, 0.0, False, False, True, 256), (4, 128, 2, 3, 8.0, True, True, False, 256)],
    "poly_attention_step": [(8, 64, 8), (8, 128, 2, 3, 0.0, False, False)],
    "quantized_routed_gate_up": [("int4",), ("fp4",), ("int8", "gelu_tanh")],
    "quantized_add_routed": [("int8",), ("fp4",)],
    "quantized_routed_down": [("int8",), ("fp4",)],
    "dequantize": [("int8",), ("fp4",), ("int4", True)],
    "quantize_rows": [(True,), (False,)],
    "quantized_decode_attention": [(8, 4, 128), (4, 2, 256), (4, 2, 256, 128, False, 1.0, 50.0)],
    "quantized_matmul": [("int4",), ("fp4",), ("uint8_32",), ("nf4",)],
    "quantized_norm_gate_up": [(), (1.0, "gelu_tanh"), (None, "silu")],
    "quantized_norm_product": [(), (1.0, 30.0), (None, 0.0)],
    "richards_glu": [(4096,)],
    "richards_glu_backward": [(4096,)],
    "rg_lru": [(False,), (True,)],
    "rms_norm": STILL,
    "routed_gate_up": [(), ("gelu_tanh",)],
    "rope": [(14, 2, 64, 32), (32, 8, 128, 64)],
    "rope_qkv": [(32, 8, 128, 64)],
    "select_experts": [(), (True, False), (False, True), (True, True, False, 1)],
    "send_products": [(), (True,)],
    "send_words": [(), (6,)],
    "short_conv": [(), (4, True, 1), (3, False, 5), (3, False, 1, True)],
    "sparse_attention": [(512,), (512, True, False, True), (512, False, False, False)],
    "split_gate_up": [("silu", 16, 1024, 4096), ("gelu_tanh", 128, 2048, 8192)],
    "split_product": [(4, 32, 1024, 1024), (4, 128, 2048, 2048), (8, 32, 4096, 512), (1, 16, 1024, 512)],
    "swiglu": [(14336, True)],
    "swiglu_backward": [(14336,)],
    "swiglu_product": [(256, 128, 4096)],
    "swiglu_product_backward": [(256, 128, 4096)],
    "tiled_add_product": [(8, 1024, 1024), (8, 4096, 1024), (16, 4096, 1024), (2, 8192, 2048)],
    "tiled_norm_gate_up": [(0.0, "silu", 8, 1024, 4096), (1.0, "gelu_tanh", 16, 1024, 4096), (0.0, "silu", 4, 2048, 8192)],
    "tiled_norm_product": [(0.0, 8, 1024, 1024), (None, 16, 1024, 1024), (0.0, 4, 2048, 2048)],
    "turn_heads": [(1,), (3,)],
}
# GPUs before 8.9 can neither round to it nor read it: there they fall back
FP8 = ("quantize", "quantize_rows", "quantize_swiglu", "quantize_swiglu_backward")
READS_FP8 = [("norm_products", (0.0, True, True)), ("norm_products", (None, True, False)), ("send_products", (True,))]


def compile_new(source, target, options) -> tuple[str, int]:
    """Return a kernel's hash and the shared memory it asks for. It is compiled unless that is kept."""
    import triton

    inputs = f"{sorted(source.signature.items())} {sorted(map(str, source.constants.items()))} {source.attrs}"
    text = f"{code_of(source.fn)} {inputs} {target.arch} {sorted(options.items())} {triton.__version__}"
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    if key not in _kept():
        _kept()[key] = triton.compile(source, target=target, options=options).metadata.shared
    return key, _kept()[key]


def compile_all() -> list[dict[str, Any]]:
    """Return a row for each kernel and GPU: what it asks for, under its hash. An op's example is drawn once for all GPUs."""
    from gpubound.kernels import selftest
    from gpubound.kernels.registry import every, load
    from tests.kernels import aot

    OPS = every()
    rows: dict[tuple[int, str], dict[str, Any]] = {}

    def compiler(source, target, options) -> None:
        key, shared = compile_new(source, target, options)
        rows[target.arch, key] = {"capability": target.arch, "key": key, "kernel": source.fn.__name__, "shared": shared}

    def run(name: str, capability: int, op: str, arguments: tuple, dtype: torch.dtype) -> None:
        aot.stand_in(capability, SHARED[capability])
        try:
            selftest._run(load("triton", op), arguments, torch.device("cpu"), dtype)
        except Exception as error:  # printed, and a failure of the whole
            why = str(error).strip().splitlines() or [""]
            failed = f"{name} {dtype}: {type(error).__name__}: {why[0]}"
            rows[capability, failed] = {"capability": capability, "failed": failed}

    aot.compiler = compiler
    for op in OPS:
        for shape in SHAPES.get(op, [()]):
            arguments = OPS[op].example(torch.Generator().manual_seed(0), *shape)
            for dtype in DTYPES:
                arguments = tree_map_only(torch.Tensor, partial(rounded, dtype), arguments)
                for capability in SHARED:
                    if capability >= 89 or not (op in FP8 or (op, shape) in READS_FP8):
                        run(f"{op} {shape}", capability, op, arguments, dtype)
    for case in [*OPS, *aot.MORE]:  # of tests/kernels/test_compiles.py
        run(case, aot.HOPPER, *aot.arguments_of(case), torch.bfloat16)
    return list(rows.values())


def rounded(dtype: torch.dtype, argument: torch.Tensor) -> torch.Tensor:
    """Return what the self-test makes of an argument for each GPU again."""
    if argument.requires_grad:
        return argument.detach().to(dtype).requires_grad_()
    return argument


@cache
def code_of(function: Any) -> str:
    """Return a hash of a kernel's code and of all functions and constants that it uses, without docstrings."""
    from triton.runtime.jit import JITCallable

    tree, used = function.parse(), {}
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local = stored | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
        if isinstance(node, ast.Name) and node.id in function.__globals__ and node.id not in local:
            value = function.__globals__[node.id]
            if isinstance(value, JITCallable):
                used[node.id] = code_of(value)
            elif not isinstance(value, ModuleType):
                used[node.id] = getattr(value, "__qualname__", None) or repr(value)  # a function's repr has its address
    return hashlib.sha256(f"{ast.dump(tree)} {sorted(used.items())}".encode()).hexdigest()


@cache
def _kept() -> dict[str, int]:
    return {key: shared for rows in _read().values() for key, shared in rows.items()}


def _read() -> dict[str, dict[str, int]]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def _keep(rows: dict[str, dict[str, int]]) -> None:
    text = json.dumps({name: dict(sorted(found.items())) for name, found in rows.items()}, indent=0) + "\n"
    if not KEPT.exists() or text != KEPT.read_text():
        (new := KEPT.with_suffix(".new")).write_text(text)
        new.replace(KEPT)  # at once: an archive may be built meanwhile


def main() -> int:
    warnings.simplefilter("ignore", UserWarning)  # of ops whose kernels only compile
    bad, kept, every = [], {*_kept()}, compile_all()
    found = {}
    for capability, limit in SHARED.items():
        rows = [row for row in every if row["capability"] == capability]
        kernels = [row for row in rows if "shared" in row]
        most = max(kernels, key=lambda row: row["shared"])
        new = len({row["key"] for row in kernels} - kept)
        print(f"sm_{capability}: {len(kernels)} kernels, {new} compiled now; {most['kernel']} asks for the most, "
              f"{most['shared']:,} of {limit:,} bytes", flush=True)  # fmt: skip
        bad += [f"sm_{capability}: {row['failed']}" for row in rows if "failed" in row]
        bad += [f"sm_{capability}: {row['kernel']}: {row['shared']:,} bytes" for row in kernels if row["shared"] > limit]
        found[f"sm_{capability}"] = {row["key"]: row["shared"] for row in kernels}
    _keep(found)
    print("\n".join(bad) or "all fit")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
