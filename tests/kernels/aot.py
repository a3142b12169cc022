"""Compile kernels for a GPU that is not here.

Triton's interpreter runs what its compiler refuses: a name first bound inside a loop and read after it, a loop variable that
changes its type. The compiler itself needs no GPU: run as a script, this replaces the launch of a kernel by its compilation for
compute capability 9.0, and calls ops on the inputs of their self-tests and on a few more that take other kernels.

    python tests/kernels/aot.py rms_norm layer_norm

One line an op: its name, then the kernels that compiled, or what went wrong. plans_fit.py compiles for other GPUs too.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from gpubound.kernels.packed_weights import TABLE

HOPPER = 90
SHARED, MULTIPROCESSORS = 232_448, 132  # of an H100 and an H200
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


def adapted(op: str, *shape: Any, dependent: int, at: int) -> tuple:
    """A step's product with adapters, launched into the kernel before it."""
    arguments = example_of(op, *shape)
    return *arguments[:at], dependent, *arguments[at + 1 :]


def shared(op: str, devices: int) -> tuple:
    """A part of a sum, or the sum, in a chain of launches."""
    from gpubound.kernels.peer_exchange import example_mail

    g = torch.Generator().manual_seed(0)
    mail = example_mail(g, devices, devices, 48)
    if op == "take_words":
        return torch.zeros(2, 48), mail, True, 2
    return torch.randn(2, 40), torch.randn(48, 40), None, mail, 2


def curve(*form: Any) -> Any:
    from gpubound.models.richards.kernels import Curve

    return Curve(*form)


def scored() -> tuple:
    """More scores than a program holds at once."""
    return torch.randn(1, 20_000), torch.tensor([20_000], dtype=torch.int32), torch.zeros(1, 512, dtype=torch.int32)


def by_token() -> tuple:
    logits, _, _, _, *rest = example_of("choose_experts")
    return logits, None, torch.zeros(9, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), *rest


def one_biased_weight(op: str, *outputs: None) -> tuple:
    """The first product of an MLP without a gate: its out has another dtype than its bias."""
    x, norm, weight, _, _, bias, *_ = example_of(op)
    return x, norm, weight, None, None, bias, None, None, torch.empty(len(x), len(weight)), *outputs


def together(op: str) -> tuple:
    """Attention of a row's two tokens together."""
    qkv, position, cache, heads, scratch, out = example_of(op)
    cache = cache._replace(**{name: t[:1] for name, t in cache._asdict().items() if t is not None})
    return qkv, position.view(1, 2), cache, heads, scratch._replace(together=True), out


def example_of(op: str, *shape: Any) -> tuple:
    from gpubound.kernels.registry import every

    return every()[op].example(torch.Generator().manual_seed(0), *shape)


def products_of(kind: str) -> dict[str, Callable[[], tuple]]:
    """Inputs of the ops that read packed weights of this kind. Of published kinds two: all products decode a tile alike."""
    from gpubound.kernels.decode_product import Norm, draw_stream
    from gpubound.kernels.packed_weights import KINDS
    from gpubound.kernels.quantized_product import draw_packed
    from gpubound.kernels.registry import draw

    g, norm = torch.Generator().manual_seed(0), Norm(torch.ones(256), 1e-6)
    given = {
        "quantized_norm_product": lambda: (
            *draw_stream(g, 256), draw_packed(g, 40, 256, kind), None, torch.zeros(2, 40), None, None),
        "dequantize": lambda: (draw_packed(g, 40, 256, kind), torch.zeros(40, 256), 1),
    }  # fmt: skip
    if kind not in (*KINDS, "fp4"):
        return given
    return given | {
        "quantized_norm_gate_up": lambda: (
            torch.randn(3, 256), norm, draw_packed(g, 40, 256, kind), None, torch.zeros(3, 20)),
        "quantized_add_product": lambda: (draw(g, 1, 9000), draw_packed(g, 40, 9000, kind), None, torch.zeros(1, 40)),
        "quantized_routed_gate_up": lambda: example_of("quantized_routed_gate_up", kind),
    }  # fmt: skip


# Cases that take kernels or plans which an op's self-test does not.
MORE = {
    "send_product to three devices": ("send_product", lambda: shared("send_product", 3)),
    "take_words of three devices": ("take_words", lambda: shared("take_words", 3)),
    "add_product with adapters": ("add_product", lambda: adapted("add_product", 16, True, dependent=1, at=4)),
    "divergence forward, of the teacher alone": ("divergence", lambda: example_of("divergence", 333, 1.0, 0.0, 1.0)),
    "divergence backwards, without a gradient": (
        "divergence",
        lambda: example_of("divergence", 4099, 1.0, 1.0, 1.0, False, False),
    ),
    "divergence forward, mixed": ("divergence", lambda: example_of("divergence", 4096, 0.5, 0.0, 1.0)),
    "norm_gate_up with adapters": ("norm_gate_up", lambda: adapted("norm_gate_up", 0.0, "silu", 16, True, dependent=2, at=7)),
    "norm_product with adapters": ("norm_product", lambda: adapted("norm_product", 0.0, 0.0, 256, False, dependent=1, at=11)),
    "norm_product of one weight with a bias": ("norm_product", lambda: one_biased_weight("norm_product", None, None)),
    "tiled_norm_product of one weight with a bias": ("tiled_norm_product", lambda: one_biased_weight("tiled_norm_product")),
    "decode_attention of tokens together": ("decode_attention", lambda: together("decode_attention")),
    "quantized_decode_attention of tokens together": (
        "quantized_decode_attention",
        lambda: together("quantized_decode_attention"),
    ),
    "choose_experts by the token": ("choose_experts", by_token),
    "decode_attention over shared keys": (
        "decode_attention",
        lambda: example_of("decode_attention", 2, 4, 256, 128, False, 0.0, 0.0, False, False, False, 0, 0.0),
    ),
    "decode_attention of wide keys that are values": (
        "decode_attention",
        lambda: example_of("decode_attention", 4, 8, 512, 256, False, 0.0, 0.0, False, False, False, 1, 1e-6),
    ),
    "choose_experts beside the shared expert": ("choose_experts", lambda: example_of("choose_experts", True)),
    "group_norm of groups larger than a tile": (
        "group_norm",
        lambda: (torch.randn(1, 2, 8200), 1, torch.ones(2), torch.ones(2)),
    ),
    "hc_write of what comes by mail": ("hc_write", lambda: example_of("hc_write", 4, True, 0, True)),
    "norm_products of fp8 and others": ("norm_products", lambda: example_of("norm_products", 0.0, True, True)),
    "send_products of fp8": ("send_products", lambda: example_of("send_products", True)),
    "hc_pre of many tokens": ("hc_pre", lambda: example_of("hc_pre", 4, True)),
    "index_topk of more scores than a program holds": ("index_topk", scored),
    "layer_norm of wide rows": ("layer_norm", lambda: (torch.randn(2, 8192), torch.ones(8192), torch.ones(8192))),
    "invariant_linear of many rows": ("invariant_linear", lambda: (torch.randn(4096, 128), torch.randn(1032, 128))),
    "lora_gradients of 16-bit adapters": (
        "lora_gradients",
        lambda: example_of("lora_gradients", 768, 768, 16, False, 1, False, True),
    ),
    "lora_product transposed, h and b by descriptors, and in two parts": (
        "lora_product",
        lambda: (torch.randn(4096, 64), torch.randn(64, 4096).t(), None, torch.randn(4096, 16), torch.randn(16, 4096).t()),
    ),
    "lora_product by pointers": (
        "lora_product",
        lambda: (torch.randn(40, 63), torch.randn(30, 63), torch.randn(30), torch.randn(40, 130), torch.randn(30, 130)),
    ),
    "richards with tail": ("richards", lambda: (torch.randn(3, 40), torch.zeros(3), curve(("nu", "k", "m"), True))),
    "rg_lru from a state": ("rg_lru", lambda: (torch.randn(2, 150, 60), torch.randn(20), torch.randn(2, 20))),
    "sparse_attention of wide heads, up to a limit": (
        "sparse_attention",
        lambda: example_of("sparse_attention", 512, True, False, True),
    ),
    "swiglu_product of many rows": ("swiglu_product", lambda: example_of("swiglu_product", 256, 128, 4096)),
    "swiglu_product_backward of many rows": (
        "swiglu_product_backward",
        lambda: example_of("swiglu_product_backward", 256, 128, 4096),
    ),
    "swiglu, limited": ("swiglu", lambda: (*example_of("swiglu"), 0.5)),
    "turn_heads back, without a norm": (
        "turn_heads",
        lambda: ([example_of("turn_heads")[0][0]._replace(weight=None, eps=None)], *example_of("turn_heads")[1:], True),
    ),
    "tiled_add_product of one row": (
        "tiled_add_product",
        lambda: (torch.randn(1, 512), torch.randn(33, 512), None, torch.zeros(1, 33)),
    ),
    "turn_heads of three parts": ("turn_heads", lambda: example_of("turn_heads", 3)),
    **{f"{op} of {kind}": (op, draw) for kind in TABLE for op, draw in products_of(kind).items()},
    "rms_norm of wide rows": ("add_rms_norm", lambda: (torch.randn(2, 8192), torch.randn(2, 8192), torch.ones(8192))),
}

compiled: list[str] = []
capability = HOPPER  # what it compiles for
compiler = None  # (source, target, options) -> None in place of triton.compile


def describe(parameter, value: Any) -> tuple[str, Any, list]:
    """(type, constant, attributes) of an argument, as a launch would specialise it."""
    if parameter.is_constexpr or value is None or isinstance(value, bool):
        return "constexpr", value, []
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype], None, [["tt.divisibility", 16]]
    if hasattr(value, "block_shape"):  # a tensor descriptor
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""  # of Gluon's
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>", None, []
    if isinstance(value, float):
        return "fp32", None, []
    if value == 1 and not parameter.do_not_specialize:
        return "constexpr", 1, []
    divisible = value % 16 == 0 and not parameter.do_not_specialize
    return "i64" if value >= 1 << 31 else "i32", None, [["tt.divisibility", 16]] if divisible else []


def compile_instead(kernel, *arguments, grid, warmup, **named):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    known = {p.name for p in kernel.params}
    options = {name: value for name, value in named.items() if name not in known}
    bound = dict(zip((p.name for p in kernel.params), arguments)) | {k: v for k, v in named.items() if k in known}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        kind, constant, attribute = describe(parameter, bound.get(parameter.name, parameter.default))
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(i,)] = constant
        if attribute:
            attributes[(i,)] = attribute
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    with warnings.catch_warnings():  # of the compiler, about its own defaults to come
        warnings.simplefilter("ignore")
        (compiler or triton.compile)(source, target=GPUTarget("cuda", capability, 32), options=options)
    compiled.append(kernel.__name__)


def arguments_of(case: str) -> tuple[str, tuple]:
    from gpubound.kernels.registry import every

    if case not in MORE:
        return case, every()[case].example(torch.Generator().manual_seed(0))
    op, draw = MORE[case]
    drawn = draw()
    if any(
        isinstance(a, torch.Tensor) and a.requires_grad for a in drawn
    ):  # made of the op's example: what has 16 bits is marked
        return op, drawn
    return op, tuple(a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in drawn)


def stand_in(compute_capability: int, shared: int) -> None:
    """From here on kernels are compiled for this GPU in place of being run, with the plans that it gets."""
    import triton

    from gpubound.device import Chip
    from gpubound.kernels import plans

    global capability
    capability = compute_capability
    plans.chip = plans.types.chip = lambda device: Chip(compute_capability, shared, MULTIPROCESSORS, "")
    triton.runtime.jit.JITFunction.run = compile_instead


def main(cases: list[str]) -> None:
    from gpubound.kernels import selftest
    from gpubound.kernels.registry import load

    stand_in(HOPPER, SHARED)
    for case in cases:
        compiled.clear()
        try:
            op, arguments = arguments_of(case)
            selftest._run(load("triton", op), arguments, torch.device("cpu"), torch.bfloat16)
            outcome = ", ".join(dict.fromkeys(compiled))
        except Exception as error:  # the line says it, and the test fails on it
            outcome = f"{type(error).__name__}: {error}".replace("\n", " | ")
        print(f"{case}: {outcome}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
