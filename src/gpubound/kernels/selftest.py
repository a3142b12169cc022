"""Each kernel's own test: a tiny forward and backward beside the reference, at its first use on a device in a dtype.

The suite in tests/ is wider. This one runs on the user's machine, with the user's driver and compiler, where it counts.
"""

from collections.abc import Callable
from typing import Any

import torch

from .cached import encode
from .choose import load
from .packed import Packed, pack
from .sampling import Rows, Settings

# Relative error allowed between a kernel and the reference, by the dtype of the call: summation order, tf32 where the op holds
# a product, and rounding on the way (2^-11, 2^-8 a time). A wrong kernel is off by far more.
LIMITS = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}

_LOSS = (-100, 0.1, 5.0, 1e-3, "mean")  # ignore_index, label_smoothing, softcap, z_loss, reduction

# op -> a function that draws its positional arguments. What `_draw` gives is cast to the dtype of the call and gets its
# gradient checked; any other tensor is passed as it is (`_draw(g, 4, 8).detach()` stays fp32 and without a gradient).
EXAMPLES: dict[str, Callable[[torch.Generator], tuple]] = {
    "adamw.adamw": lambda g: (_draw(g, 70), *_flat(g, 4), _plan(), 0.9, 0.99, 1e-8, 40, None),
    "adamw.plan_update": lambda g: (*_flat(g, 1), _wide(5, 7), _wide(3, 1, 2, 1), _wide(1, 2, 3, 4), 0.9, 0.99, 0.1, 1.0, 2),
    "adamw8": lambda g: (*_coded(g, 300), _plan(), 0.9, 0.99, 1e-8, 40, None),
    "add_rows": lambda g: (_draw(g, 9, 40).detach(), _ints(3, 8, 3, 0, 3), _draw(g, 5, 40), 0),
    "cross_entropy": lambda g: (_draw(g, 5, 300), _labels(g, 5, 300), *_LOSS),
    "decode_attention": lambda g: (*_decoding(g), None, None, 1e-6, 0.25, 0, *_scratch()),
    "decode_attention.quantized_decode_attention": lambda g: (*_coded_caches(g), None, None, 1e-6, 0.25, 0, *_scratch(g)),
    "decode_product.add_product": lambda g: (_draw(g, 2, 40), _draw(g, 48, 40), None, _draw(g, 2, 48).detach()),
    "decode_product.norm_gate_up": lambda g: (_draw(g, 2, 48).detach(), _draw(g, 48), 1e-6, *_gate_up(g)),
    "decode_product.norm_product": lambda g: (_draw(g, 2, 48).detach(), _draw(g, 48), 1e-6, *_q_k_v(g)),
    "decode_product.norm_rows": lambda g: (_draw(g, 2, 48).detach(), _draw(g, 48), 1e-6, torch.zeros(2, 48)),
    "dynamic_tanh": lambda g: (_draw(g, 3, 40), _draw(g, 1), _draw(g, 40), _draw(g, 40)),
    "experts.add_routed": lambda g: (_draw(g, 2, 3, 40), _draw(g, 5, 48, 40), *_routes(), _draw(g, 2, 48).detach()),
    "experts.route": lambda g: (*_stream(g, 48), _draw(g, 5, 48), True, *_routing(2, 5, 3)),
    "experts.routed_gate_up": lambda g: (*_stream(g, 48), _draw(g, 5, 80, 48), _routes()[0], torch.zeros(2, 3, 40)),
    "geglu": lambda g: (_draw(g, 3, 40), _draw(g, 3, 40), "tanh"),
    "group_norm": lambda g: (_draw(g, 2, 6, 5, 7), 3, _draw(g, 6), _draw(g, 6), 1e-5),
    "layer_norm": lambda g: (_draw(g, 3, 40), _draw(g, 40), _draw(g, 40), 1e-5),
    "linear_cross_entropy": lambda g: (_draw(g, 5, 40), _draw(g, 300, 40), _labels(g, 5, 300), _draw(g, 300), *_LOSS, 3),
    "quantize": lambda g: (_draw(g, 32, 48), _scale(), torch.float8_e4m3fn, True),
    "quantize.quantize_swiglu": lambda g: (_draw(g, 32, 96), _scale(), torch.float8_e4m3fn),
    "quantize.quantize_swiglu_backward": lambda g: (_draw(g, 32, 48), _draw(g, 32, 96), _scale(), torch.float8_e5m2),
    "quantized_product.dequantize": lambda g: (_packed(g, 40, 150, "int8"), _draw(g, 40, 150).detach(), 2),
    "quantized_product.quantized_add_product": lambda g: (_draw(g, 2, 150), _packed(g, 40, 150, "fp8"), *_bias_and(g, 40, 40)),
    "quantized_product.quantized_norm_gate_up": lambda g: (
        *_stream(g, 150),
        _packed(g, 40, 150, "int8"),
        *_bias_and(g, 40, 20),
    ),
    "quantized_product.quantized_norm_product": lambda g: (
        *_stream(g, 256),
        _packed(g, 40, 256, "int4"),
        *_bias_and(g, 40, 40),
        torch.zeros(2, 3),
        torch.zeros(2, 3, dtype=torch.int32),
    ),
    "rms_norm": lambda g: (_draw(g, 3, 40), _draw(g, 40), 1e-6),
    "rms_norm.add_rms_norm": lambda g: (_draw(g, 3, 40), _draw(g, 3, 40), _draw(g, 40), 1e-6),
    "rope": lambda g: (_draw(g, 2, 3, 4, 16), _draw(g, 2, 3, 2, 16), *_angles(g, 3, 8)),
    "rope.rope_qkv": lambda g: (_draw(g, 2, 3, 8 * 16), *_angles(g, 3, 8), 4, 2),
    "sampling.pick": lambda g: (_draw(g, 4, 50).detach(), _counted(4, 50), _rows(), *_outputs(g)),
    "sampling.sample": lambda g: (_draw(g, 4, 300).detach(), _rows(), _settings(), *_outputs(g)),
    "speculation.accept": lambda g: (*_verified(), _rows(), _text(), _ints(*[0] * 12).view(3, 4)),
    "speculation.propose": lambda g: (_rows(), _text(), *_chunks(), _draw(g, 9, 40).detach(), _draw(g, 12, 40).detach()),
    "swiglu": lambda g: (_draw(g, 3, 80), None),
    "swiglu_backward": lambda g: (_draw(g, 3, 40), _draw(g, 3, 80)),
}


def _draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32, requires_grad=True)


def _flat(generator: torch.Generator, count: int) -> list[torch.Tensor]:
    return [_draw(generator, 70).detach().square() for _ in range(count)]


def _coded(generator: torch.Generator, size: int) -> tuple[torch.Tensor, ...]:
    """Weights, a gradient, both moments in 8 bits, their scales (one for 256 elements), masters."""
    weight, gradient, master = (_draw(generator, size) for _ in range(3))
    codes = torch.randint(-127, 128, (size,), generator=generator, device="cpu")
    scales = torch.linspace(0.5, 2, -(-size // 256), device="cpu")
    moments = codes.to(torch.int8), codes.abs().to(torch.uint8), scales, scales.square()
    return weight, gradient.detach(), *moments, master.detach()


def _labels(generator: torch.Generator, rows: int, words: int) -> torch.Tensor:
    """Labels, the second of them ignored."""
    labels = torch.randint(words, (rows,), generator=generator, device="cpu")
    labels[1] = -100
    return labels


def _angles(generator: torch.Generator, tokens: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = 6 * _draw(generator, tokens, pairs).detach()
    return angles.cos(), angles.sin()


def _wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, device="cpu", dtype=torch.float64)


def _scale() -> torch.Tensor:
    return _wide(0.02, 0).float()


def _decoding(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """A packed product, positions, both caches and the angles of two rows, four heads of 16 over two, ten places."""
    positions = torch.tensor([9, 3], device="cpu", dtype=torch.int32)
    caches = _draw(generator, 2, 2, 10, 16), _draw(generator, 2, 2, 10, 16)
    return _draw(generator, 2, 8 * 16).detach(), positions, *caches, *_angles(generator, 10, 8)


def _coded_caches(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """The same over caches of codes in int8 and their scales."""
    qkv, positions, keys, values, *angles = _decoding(generator)
    (keys, k_scale), (values, v_scale) = (encode(cache, torch.int8) for cache in (keys, values))
    return qkv, positions, keys, values, k_scale, v_scale, *angles


def _scratch(generator: torch.Generator | None = None) -> tuple[torch.Tensor, ...]:
    """Partial sums, counters, and out: fp32, or with a generator the dtype of the call."""
    out = torch.zeros(2, 64) if generator is None else _draw(generator, 2, 64)
    return torch.zeros(2, 2, 4, 2, 18), torch.zeros(4, dtype=torch.int32), out


def _q_k_v(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    weights = [_draw(generator, rows, 48) for rows in (32, 16, 16)]
    biases = [_draw(generator, rows) for rows in (32, 16, 16)]
    return *weights, *biases, torch.zeros(2, 64), torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int32)


def _gate_up(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return *(_draw(generator, 40, 48) for _ in range(2)), *(_draw(generator, 40) for _ in range(2)), torch.zeros(2, 40)


def _routes() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights: three of five experts for each of two rows."""
    return _ints(4, 0, 2, 2, 3, 1).view(2, 3), _wide(0.5, 0.3, 0.2, 0.4, 0.3, 0.1).float().view(2, 3)


def _routing(rows: int, experts: int, slots: int) -> tuple[torch.Tensor, ...]:
    """Logits, count, and where ids and weights go."""
    ids = torch.zeros(rows, slots, dtype=torch.int32)
    return torch.zeros(rows, experts), torch.zeros(rows, dtype=torch.int32), ids, torch.zeros(rows, slots)


def _packed(generator: torch.Generator, rows: int, columns: int, kind: str) -> Packed:
    return pack(_draw(generator, rows, columns).detach(), kind)


def _stream(generator: torch.Generator, columns: int) -> tuple:
    """x, norm, eps."""
    return _draw(generator, 2, columns).detach(), _draw(generator, columns), 1e-6


def _bias_and(generator: torch.Generator, rows: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A bias, and what is written or added to."""
    return _draw(generator, rows), torch.zeros(2, outputs)


def _plan() -> torch.Tensor:
    return _wide(1, 0.5, 0.9, 0.5, 2, 3).float()


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cpu", dtype=torch.int32)


def _counted(rows: int, columns: int) -> torch.Tensor:
    return _ints(*range(columns)).repeat(rows, 1)


def _rows() -> Rows:
    """Four rows: two go on, one is dead, one reaches its limit."""
    return Rows(_ints(1, 1, 1, 1), _ints(3, 4, 5, 6), _ints(1, 1, 0, 1), _ints(9, 9, 9, 8), _ints(0, 0, 0, 0), _ints(7, -1))


def _settings() -> Settings:
    """Greedy; top-k and min-p; anything; top-p."""
    cool, top_p = _wide(0, 0.8, 1, 1.2).float(), _wide(1, 1, 1, 0.9).float()
    min_p, penalty = _wide(0, 0.05, 0, 0).float(), _wide(1, 1.3, 1, 1).float()
    seen = (_counted(4, 300) % 3 == 0).to(torch.uint8)
    return Settings(cool, _ints(0, 20, 0, 0), top_p, min_p, penalty, _ints(1, 2, 3, 4).long(), _ints(0, 1, 0, 1), seen)


def _outputs(generator: torch.Generator) -> tuple:
    """emitted, then neither logprob nor marks, then an embedding and where it goes."""
    return _ints(0, 0, 0, 0), None, _draw(generator, 300, 40).detach(), _draw(generator, 4, 40).detach()


def _text() -> torch.Tensor:
    """Four texts of ten places, with threes, twos and ones that come again."""
    return _ints(1, 2, 3, 1, 2, 3, 1, 2, 3, 1).repeat(4, 1)


def _chunks() -> list[torch.Tensor]:
    return [_ints(*[0] * 12).view(4, 3) for _ in range(3)]


def _verified() -> tuple[torch.Tensor, ...]:
    """Chosen, going, and the chunk: all foreseen, none, a dead row, an end in the middle."""
    chosen, going = _ints(5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7), _ints(1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0)
    return chosen.view(4, 3), going.view(4, 3), _ints(1, 5, 6, 1, 6, 7, 1, 5, 6, 1, 5, 6).view(4, 3)


def check(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """None when Triton and the reference agree on outputs and every gradient, else one sentence with the worst of them."""
    arguments = EXAMPLES[op](torch.Generator().manual_seed(0))
    test = f"its self-test in {dtype} on {device}"
    try:
        got = _run(load("triton", op), arguments, device, dtype)
    except Exception as error:  # compiling a kernel can raise anything; the reason is reported, never dropped
        return f"{test} raised {type(error).__name__}: {(str(error).strip().splitlines() or ['(no message)'])[0]}"
    want = _run(load("reference", op), arguments, torch.device("cpu"), dtype)
    if missing := want.keys() ^ got.keys():
        return f"{test} failed: only one of kernel and reference gives {', '.join(sorted(missing))}"
    errors = {name: _relative(got[name], want[name]) for name in want}
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    if errors[worst] <= LIMITS[dtype]:
        return None
    return f"{test} failed: {worst} is off by {errors[worst]:.2e} relative to the reference (limit {LIMITS[dtype]:.0e})"


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖; infinite for another shape or dtype, NaN when either holds one."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    a, b = got.double().cpu(), want.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()


def _run(function: Callable, arguments: tuple, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name, with fixed upstream gradients."""
    moved = [_move(a, device, dtype) for a in arguments]
    result = function(*moved)
    outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
    wired = [t for t in outputs if t.requires_grad]  # an optimizer's update has no backward
    upstream = [torch.linspace(-1, 1, t.numel()).reshape(t.shape).to(t) for t in wired]
    wanted = {
        f"the gradient of argument {i}": t for i, t in enumerate(moved) if isinstance(t, torch.Tensor) and t.requires_grad
    }
    # On this thread: an op's first call may come in backward (what is computed again there), and then the device's own thread
    # is the one that waits for this verdict. Left to it, both would wait for ever.
    with torch.autograd.set_multithreading_enabled(False):
        gradients = torch.autograd.grad(wired, list(wanted.values()), upstream, allow_unused=True) if wired else ()
    named = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    return named | {name: g for name, g in zip(wanted, gradients) if g is not None}


def _move(argument: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*(_move(a, device, dtype) for a in argument))
    if not isinstance(argument, torch.Tensor):
        return argument
    own = argument.detach().clone()  # an op may write into its arguments, and the other mirror gets them too
    return own.to(device, dtype).requires_grad_() if argument.requires_grad else own.to(device)
