"""The self-test behind a verdict: in the caller's shape, outside the caller's modes, and on the caller's own thread."""

import subprocess
import sys
from contextlib import nullcontext
from inspect import signature

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpubound import kernels
from gpubound.kernels import dispatch, selftest
from gpubound.kernels.registry import every
from gpubound.kernels.triton import norms as fast, recurrent
from gpubound.models.richards.kernels.richards import GATE, VALUE, Curve

from .cases import TOLERANCE, definitions, same

OPS = every()

reference = definitions("norms")

pytestmark = pytest.mark.usefixtures("fresh")

FP32 = torch.float32


SHAPED = {
    "activate_rows": ("relu2",),
    "adamw": ((0.9, 0.95), 1e-6, False, False),
    "adamw8": (False,),
    "add_adapters": (16, True),
    "add_dynamic_tanh": (96,),
    "add_norm": (1.0,),
    "add_product": (16, True),
    "add_rms_norm": (96,),
    "add_rows": (48,),
    "choose_experts": (True,),
    "chunk_scan": (False, 24, 16, 32, False),
    "compress": (1, 2),
    "cross_entropy": (333, False, True),
    "decode_attention": (1, 3, 32),
    "delta_step": (1, 3, 8, 16, True, 2),
    "dequantize": ("fp4",),
    "divergence": (333, 0.5, 1.0, 1.0, False, True),
    "dynamic_tanh": (96,),
    "geglu": (72, True),
    "hc_head": (4, True),
    "hc_read": (2,),
    "hc_sums": (2,),
    "hc_write": (2, True, 0, True),
    "hc_post": (2,),
    "hc_pre": (2, True),
    "invariant_attention": (16,),
    "invariant_cached_attention": (16, True),
    "invariant_linear": (33, 40),
    "latent_attention": (5, 20, 16, 48, 6),
    "latent_queries": (5, 20, 16, 48, 6, False),
    "layer_norm": (96,),
    "layer_norm_rows": (False, 1.0),
    "linear_cross_entropy": (333, True, False, True, True),
    "lora_down": (16, False, True, 1, True),
    "lora_gradients": (48, 64, 16, False, 2, False, True),
    "lora_product": (0, 16, True, False),
    "lora_up": (16, False, 3),
    "mamba_step": (3, 8, 1, 16, 2, False),
    "norm_gate_up": (1.0, "gelu_tanh"),
    "norm_product": (1.0, 30.0, 16, True),
    "norm_products": (1.0,),
    "norm_rows": (1.0,),
    "plan_update": (160, (0.9, 0.95), 0.2, None, 0),
    "poly_attention": (2, 16, 1, 5, 0.0, False, True, False, 20),
    "poly_attention_step": (2, 16, 1, 5, 0.0, False, True),
    "quantize": (torch.float8_e5m2, False),
    "quantize_rows": (False,),
    "quantized_add_routed": ("fp4",),
    "quantized_column_down": ("fp4",),
    "quantized_column_gate_up": ("fp4",),
    "quantized_decode_attention": (3, 1, 32),
    "quantized_matmul": ("nf4",),
    "quantized_norm_gate_up": (1.0, "gelu_tanh"),
    "quantized_norm_product": (1.0, 30.0),
    "quantized_routed_down": ("fp4",),
    "quantized_routed_gate_up": ("fp4",),
    "richards": (Curve(("nu", "k", "m"), tail=True),),
    "richards_glu": (72, GATE, VALUE),
    "richards_glu_backward": (72, Curve(), GATE),
    "rg_lru": (True,),
    "rms_norm": (96,),
    "routed_gate_up": ("gelu_tanh",),
    "rope": (3, 1, 24, 8),
    "rope_qkv": (6, 3, 8, 4),
    "select_experts": (False, True),
    "send_products": (True,),
    "send_words": (3,),
    "short_conv": (4, True, 2),
    "sink_attention": (6, 2, 24, True, False),
    "sparse_attention": (32, True, False, True),
    "split_gate_up": ("gelu_tanh", 9, 72, 40),
    "split_product": (2, 9, 72, 20),
    "swiglu": (72, False),
    "swiglu_backward": (72,),
    "swiglu_product": (72, 40, 9),
    "swiglu_product_backward": (72, 40, 9),
    "take_words": (True,),
    "tiled_add_product": (3, 72, 40),
    "tiled_norm_gate_up": (1.0, "gelu_tanh"),
    "tiled_norm_product": (None, 9, 72),
    "turn_heads": (3,),
    "write_tokens": (40, 16, torch.int64, False),
}


def test_which_ops_test_themselves_in_their_callers_shape():
    assert sorted(SHAPED) == sorted(op for op in OPS if len(signature(OPS[op].example).parameters) > 1)


@pytest.mark.parametrize("where", [0, 9])
def test_large_results_are_compared_by_parts(where, device, monkeypatch):
    monkeypatch.setattr(selftest, "PART", 4)
    want = torch.arange(1.0, 11).view(2, 5)
    got = want.to(device, copy=True)
    got.view(-1)[where] += 3
    assert selftest._relative(got, want) == pytest.approx(3 / 385**0.5)  # 385 is the sum of their squares
    for value, error in ((torch.inf, 0.0), (torch.nan, torch.nan)):
        got, alike = want.to(device, copy=True), want.clone()
        got.view(-1)[where] = alike.view(-1)[where] = value
        assert selftest._relative(got, alike) == pytest.approx(error, nan_ok=True)


# exp(-gate) of a gate far below 0 is infinite, and 1 / infinity the right 0; NumPy, which interprets, warns.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("op", SHAPED)
def test_self_tests_in_the_callers_shape(op, device):
    assert selftest.check(op, device, FP32, SHAPED[op]) is None


@pytest.mark.parametrize("op", ["norm_product", "quantized_norm_product"])
@pytest.mark.parametrize("shape", [(0.0, 1.5), (1.0, 1.5), (None, 5.0), (1.0, 15.0), (0.0, 0.0)])
def test_the_largest_of_capped_outputs_is_not_rounding_s_choice(op, shape, device):
    """Products of packed levels are 2e-5 off, tanh 1e-7: where the next largest is 1 % less, both choose the same."""
    assert selftest.check(op, device, FP32, shape) is None
    out, best, _ = selftest.run("reference", op, torch.device("cpu"), FP32, shape, True).values()
    ranges = torch.nn.functional.pad(out, (0, -out.shape[1] % 16), value=-torch.inf).unflatten(1, (-1, 16))
    first, second = ranges.topk(2).values.unbind(-1)
    assert torch.equal(first, best) and (first - second > 1e-2 * best.abs().max()).all()


@pytest.mark.parametrize("precise", [False, True])
def test_a_call_that_multiplies_in_tf32_is_compared_as_fp16(precise, device, monkeypatch):
    definition = OPS["chunk_scan"].reference
    monkeypatch.setattr(recurrent, "chunk_scan", lambda *given: tuple(1.003 * t for t in definition(*given)))
    assert (selftest.check("chunk_scan", device, FP32, (True, 16, 16, 16, precise)) is None) is not precise


@pytest.mark.gpu
@pytest.mark.parametrize("precise", [False, True])
def test_the_scan_at_the_size_of_qwen3_5(precise, device):
    assert selftest.check("chunk_scan", device, FP32, (True, 128, 128, 64, precise)) is None


@pytest.mark.parametrize("still", [False, True])
def test_the_norm_behind_a_rounded_residual(still, device):
    """fp16: what the interpreter stores as bf16 is cut off, not rounded."""
    assert selftest.check("add_rms_norm", device, FP32, (96, still, torch.float16)) is None


@pytest.mark.parametrize("op", sorted(OPS.keys() - SHAPED.keys()))
def test_self_tests_of_ops_without_shapes(op, device):
    assert selftest.check(op, device, FP32) is None


@pytest.mark.parametrize("op", ["dynamic_tanh", "group_norm", "layer_norm", "rms_norm", "add_rms_norm"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_norms_pass_their_self_tests(op, dtype, device):
    assert selftest.check(op, device, dtype) is None


def test_the_self_test_leaves_its_arguments_alone(device, monkeypatch):
    """An op that works in place on what both mirrors get would compare the second update with the first."""

    def in_place(x, weight, eps):
        return x.detach().mul_(2) * weight

    monkeypatch.setattr(fast, "rms_norm", in_place)
    monkeypatch.setitem(OPS, "rms_norm", OPS["rms_norm"]._replace(reference=in_place))
    assert selftest.check("rms_norm", device, FP32) is None


def test_forward_alone_makes_no_gradient(device, monkeypatch):
    right = fast.rms_norm
    monkeypatch.setattr(fast, "rms_norm", lambda x, weight, eps: right(x, weight, eps) + (x - x.detach()))
    assert "gradient" in (selftest.check("rms_norm", device, FP32) or "")
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **named: pytest.fail("backward"))
    assert selftest.check("rms_norm", device, FP32, (), True) is None
    monkeypatch.setattr(fast, "rms_norm", lambda x, weight, eps: right(x, weight, eps) + 1)
    assert "output 0" in (selftest.check("rms_norm", device, FP32, (), True) or "")


MODES = {
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


def test_a_self_test_runs_on_its_device(monkeypatch):
    """Triton launches on the current device, and a test's thread begins on the first."""
    entered = []
    monkeypatch.setattr(selftest, "entered", lambda device: entered.append(device) or nullcontext())
    assert selftest.check("rms_norm", torch.device("cpu"), torch.float32) is None
    assert entered == [torch.device("cpu")]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_verdict_does_not_depend_on_the_callers_modes(mode, x):
    with mode():
        kernels.rms_norm(x)
    assert list(dispatch._verdicts.values()) == [None]


def test_first_use_inside_a_checkpointed_block(x):
    """The self-test runs in the forward and not in the recomputation: its saved tensors must not be counted as the block's."""
    x.requires_grad_()
    checkpoint(kernels.rms_norm, x, use_reentrant=False).square().sum().backward()
    want = x.detach().clone().requires_grad_()
    reference.rms_norm(want).square().sum().backward()
    same("x.grad", x.grad, want.grad, 1e-5)


def test_the_default_dtype_does_not_reach_the_self_test(x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert dispatch.verdict("rms_norm", x.device, FP32) is None
    finally:
        torch.set_default_dtype(before)


def test_a_self_test_leaves_the_device_s_own_thread_alone(monkeypatch):
    """That thread may be the one that waits for the verdict: of an op whose first call comes in backward, say."""
    threads, grad = [], torch.autograd.grad

    def watched(*arguments, **named):
        threads.append(torch._C._is_multithreading_enabled())
        return grad(*arguments, **named)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    assert selftest.check("rms_norm", torch.device("cpu"), FP32) is None
    assert threads == [False, False]  # Triton's gradients, and the reference's


FIRST_IN_BACKWARD = """
import torch
from gpubound import kernels

class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return kernels.rms_norm(g.contiguous())

x = torch.ones(3, 40, device="cuda", requires_grad=True)
Late.apply(x).sum().backward()
print("agrees" if x.grad.allclose(torch.ones_like(x), atol=1e-4) else x.grad)
"""


@pytest.mark.gpu
def test_an_op_whose_first_call_comes_in_backward():
    """In a process of its own, where nothing has judged the op yet. It waited for ever."""
    done = subprocess.run([sys.executable, "-c", FIRST_IN_BACKWARD], capture_output=True, text=True, timeout=300)
    assert done.stdout == "agrees\n", done.stderr


@pytest.mark.parametrize("op", ["lora_up", "dequantize_nf4"])
def test_an_output_that_is_passed_has_the_dtype_of_the_call(op):
    """In fp32 another kernel would be compiled and tested than a call in 16 bits launches, and one that spills registers."""
    arguments = OPS[op].example(torch.Generator().manual_seed(0))
    outputs = selftest._run(OPS[op].reference, arguments, torch.device("cpu"), torch.bfloat16)
    assert {t.dtype for t in outputs.values()} == {torch.bfloat16}
