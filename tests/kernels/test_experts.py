"""A sparse MLP's doors: parity with the reference, choices that are always experts, the same bits in any batch, sentences."""

import math

import pytest
import torch

from gpubound import kernels
from gpubound.kernels import plans
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.experts import likeliest
from gpubound.kernels.plans.types import MatrixPlan
from gpubound.kernels.registry import load
from gpubound.models.deepseek_v4.kernels import choose_experts
from tests.messages import refusals

from .apart import apart
from .cases import DTYPES, SOURCES, agree, draw, pairwise, same

# (rows, slots, experts, hidden, width): one slot, powers of two, widths that are none, all experts, more than fit a comparison
SHAPES = [(1, 1, 4, 64, 32), (2, 2, 8, 64, 32), (8, 2, 4, 33, 50), (2, 8, 8, 96, 24), (1, 8, 100, 64, 9)]
EACH = [(shape, torch.float32) for shape in SHAPES] + [((3, 3, 6, 40, 7), dtype) for dtype in DTYPES]
PARITY = pytest.mark.parametrize("shape, dtype", EACH)


def routed(source, x, norm, router, slots, normalise=True):
    """(ids, weights) of the op, its scratch as every launch finds and leaves it."""
    rows, experts = len(x), len(router)
    count = torch.zeros(rows, device=x.device, dtype=torch.int32)
    ids = torch.full((rows, slots), -1, device=x.device, dtype=torch.int32)
    weights = torch.empty(rows, slots, device=x.device)
    load(source, "route")(x, norm, router, normalise, x.new_zeros(rows, experts), count, ids, weights)
    assert not count.any()
    return ids, weights


def some_ids(device, rows: int, slots: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.stack([torch.randperm(experts, generator=generator)[:slots] for _ in range(rows)]).int().to(device)


@PARITY
def test_the_choice_agrees_with_the_reference(device, shape, dtype):
    rows, slots, experts, hidden, _ = shape
    x, norm = draw(device, torch.float32, rows, hidden), Norm(draw(device, dtype, hidden, seed=1), 1e-5)
    router = draw(device, dtype, experts, hidden, seed=2) * hidden**-0.5
    found = torch.full((rows, slots), -1, device=device, dtype=torch.int32), torch.empty(rows, slots, device=device)
    scratch = torch.zeros(rows, experts, device=device), torch.zeros(rows, device=device, dtype=torch.int32)
    for normalise in (True, False):
        *_, weights = agree("route", x, norm, router, normalise, *scratch, *found)
        if normalise:
            same("sums", weights.sum(1), torch.ones(rows, device=device), 1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_reference_chooses_as_hugging_face_does(normalise):
    """softmax in fp32, topk, shares of what was chosen or of all."""
    logits = draw(torch.device("cpu"), torch.float32, 50, 16)
    best = logits.softmax(-1).topk(4)
    want = best.values / best.values.sum(-1, keepdim=True) if normalise else best.values
    ids, shares = likeliest(logits, 4, normalise)
    assert torch.equal(ids, best.indices)
    same("shares", shares, want, 1e-6)


def set_logits(device, logits: list[float]) -> tuple[torch.Tensor, Norm, torch.Tensor]:
    """x, norm and a router with which an expert's logit is as given: hidden is one place for each expert, and one that is 1."""
    x = torch.zeros(1, 16, device=device)
    x[0, 0] = 1.0
    router = torch.zeros(len(logits), 16, device=device)
    router[:, 0] = torch.tensor(logits, device=device) / math.sqrt(16)
    return x, Norm(torch.ones(16, device=device), 1e-5), router


@pytest.mark.parametrize("source", SOURCES)
def test_equal_logits_lowest_id_first(source, device):
    given = set_logits(device, [1.0, 3.0, 1.0, 3.0, 0.0, -0.0])
    for slots, want in ((1, [1]), (2, [1, 3]), (3, [1, 3, 0]), (5, [1, 3, 0, 2, 4]), (6, [1, 3, 0, 2, 4, 5])):
        ids, _ = routed(source, *given, slots)
        assert ids.tolist() == [want]


@pairwise
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("places", [[2], [0, 5], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("normalise", [True, False])
def test_whatever_the_logits_are_ids_are_distinct_experts(source, device, bad, places, normalise):
    """What is not finite reaches the weights, and so the stream; no id may lead a load out of the experts."""
    x, norm, router = set_logits(device, [0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    for place in places:
        router[place, 0] = bad
    ids, weights = routed(source, x, norm, router, 3, normalise)
    assert len(set(ids[0].tolist())) == 3 and int(ids.min()) >= 0 and int(ids.max()) < 6
    if bad == float("-inf") and len(places) < 4:
        assert weights.isfinite().all() and not set(places) & set(ids[0].tolist())
    else:
        assert weights.isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("source", SOURCES)
def test_a_nan_in_the_stream_reaches_the_weights_of_its_row_alone(source, device):
    x, norm = draw(device, torch.float32, 3, 64), Norm(draw(device, torch.float32, 64, seed=1), 1e-5)
    router = draw(device, torch.float32, 8, 64, seed=2)
    x[1, 5] = float("nan")
    ids, weights = routed(source, x, norm, router, 2)
    assert weights.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert ids[1].tolist() == [0, 1]


@PARITY
def test_gates_and_ups_agree_with_the_reference(device, shape, dtype):
    rows, slots, experts, hidden, width = shape
    x, norm = draw(device, torch.float32, rows, hidden), Norm(draw(device, dtype, hidden, seed=1), 1e-5)
    gate_up = draw(device, dtype, experts, 2 * width, hidden, seed=2) * hidden**-0.5
    out = torch.empty(rows, slots, width, device=device, dtype=dtype)
    agree("routed_gate_up", x, norm, gate_up, some_ids(device, rows, slots, experts), out)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_another_activation(device, activation):
    x, norm = draw(device, torch.float32, 2, 48), Norm(draw(device, torch.float32, 48, seed=1), 1e-5)
    gate_up, out = draw(device, torch.float32, 4, 36, 48, seed=2) * 0.2, torch.empty(2, 3, 18, device=device)
    agree("routed_gate_up", x, norm, gate_up, some_ids(device, 2, 3, 4), out, 0, float("inf"), activation)


@pytest.mark.parametrize("source", SOURCES)
def test_gates_and_ups_are_limited_before_their_product(source, device):
    """A gate from above alone; a NaN stays one."""
    x, norm = draw(device, torch.float32, 3, 64), Norm(draw(device, torch.float32, 64, seed=1), 1e-5)
    gate_up, ids = draw(device, torch.float32, 4, 24, 64, seed=2), some_ids(device, 3, 2, 4)
    x[2, 7] = float("nan")
    out = torch.zeros(3, 2, 12, device=device)
    load(source, "routed_gate_up")(x, norm, gate_up, ids, out, 0, 0.75)
    normed = torch.nn.functional.rms_norm(x.double(), (64,), norm.weight.double(), 1e-5)
    gate, up = torch.einsum("bh,bsih->bsi", normed, gate_up.double()[ids.long()]).chunk(2, -1)
    assert (gate[:2] < -0.75).any() and (gate[:2] > 0.75).any() and (up[:2].abs() > 0.75).any()
    want = torch.nn.functional.silu(gate.clamp(max=0.75)) * up.clamp(-0.75, 0.75)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5, equal_nan=True)
    assert out[2].isnan().all() and out[:2].isfinite().all()


@PARITY
def test_the_weighted_sum_agrees_with_the_reference(device, shape, dtype):
    rows, slots, experts, hidden, width = shape
    h, down = draw(device, dtype, rows, slots, width), draw(device, dtype, experts, hidden, width, seed=1)
    ids, weights = some_ids(device, rows, slots, experts), draw(device, torch.float32, rows, slots, seed=2).softmax(1)
    agree("add_routed", h, down, ids, weights, draw(device, torch.float32, rows, hidden, seed=3))


@PARITY
def test_slots_that_stay_apart_are_what_is_added(device, shape, dtype):
    rows, slots, experts, hidden, width = shape
    h, down = draw(device, dtype, rows, slots, width), draw(device, dtype, experts, hidden, width, seed=1)
    ids, weights = some_ids(device, rows, slots, experts), draw(device, torch.float32, rows, slots, seed=2).softmax(1)
    x = load("reference", "add_routed")(h, down, ids, weights, torch.zeros(rows, hidden, device=device))
    *_, out = agree("routed_down", h, down, ids, weights, torch.empty(rows, slots, hidden, device=device))
    same("slots", out.sum(1), x, 1e-5)


@pytest.mark.parametrize("source", SOURCES)
def test_an_expert_that_is_not_there_is_nan_in_its_slot(source, device):
    h, down = torch.ones(1, 2, 16, device=device), torch.ones(3, 32, 16, device=device)
    ids, out = torch.tensor([[1, 3]], device=device, dtype=torch.int32), torch.zeros(1, 2, 32, device=device)
    load(source, "routed_down")(h, down, ids, torch.full((1, 2), 0.5, device=device), out)
    assert out[:, 0].eq(8).all() and out[:, 1].isnan().all()


@pytest.mark.parametrize("source", SOURCES)
def test_only_chosen_experts_are_read(source, device):
    """All others are NaN."""
    gate_up, down = torch.full((6, 16, 32), float("nan"), device=device), torch.full((6, 32, 8), float("nan"), device=device)
    ids = torch.tensor([[4, 1], [1, 5]], device=device, dtype=torch.int32)
    for expert in (1, 4, 5):
        gate_up[expert], down[expert] = 0.1, 0.1
    out, x = torch.zeros(2, 2, 8, device=device), torch.zeros(2, 32, device=device)
    load(source, "routed_gate_up")(
        torch.ones(2, 32, device=device), Norm(torch.ones(32, device=device), 1e-5), gate_up, ids, out
    )
    load(source, "add_routed")(out, down, ids, torch.full((2, 2), 0.5, device=device), x)
    assert out.isfinite().all() and x.isfinite().all() and (x > 0).all()


def test_tiles_that_do_not_divide_the_columns_stay_inside(device, monkeypatch):
    """Behind the last expert lies NaN, and NaN times a masked zero would show."""
    for kind, shape in (("router", (3, 40)), ("routed_gate_up", (18, 40)), ("add_routed", (40, 18))):
        monkeypatch.setitem(plans.TRIED, ("product", kind, shape), MatrixPlan(4, 16, 4))
    half = torch.float16
    x, norm = draw(device, torch.float32, 2, 40), Norm(draw(device, half, 40, seed=1), 1e-5)
    router, gate_up, down = (draw(device, half, *s, seed=2 + i) for i, s in enumerate(((3, 40), (3, 36, 40), (3, 40, 18))))
    found = torch.empty(2, 3, device=device, dtype=torch.int32), torch.empty(2, 3, device=device)
    scratch = torch.zeros(2, 3, device=device), torch.zeros(2, device=device, dtype=torch.int32)
    *_, ids, weights = agree("route", x, norm, router, True, *scratch, *found)
    *_, out = agree("routed_gate_up", x, norm, gate_up, ids, torch.empty(2, 3, 18, device=device))
    agree("add_routed", out, down, ids, weights, torch.zeros(2, 40, device=device))


@pytest.mark.parametrize("columns", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_gives_the_same_bits_in_any_batch(device, dtype, columns, monkeypatch):
    """One tile a row of the weight, and several."""
    hidden, width, experts, slots = 128, 32, 4, 2
    shapes = (("router", (experts, hidden)), ("routed_gate_up", (width, hidden)), ("add_routed", (hidden, width)))
    for kind, shape in shapes:
        monkeypatch.setitem(plans.TRIED, ("product", kind, shape), MatrixPlan(8, min(columns, shape[1]), 4))
    x, norm = draw(device, torch.float32, 4, hidden), Norm(draw(device, dtype, hidden, seed=1), 1e-5)
    router, gate_up = draw(device, dtype, experts, hidden, seed=2), draw(device, dtype, experts, 2 * width, hidden, seed=3)
    down = draw(device, dtype, experts, hidden, width, seed=4)

    def results(rows):
        mine = x[rows].clone()
        ids, weights = routed("triton", mine, norm, router, slots)
        out = torch.zeros(len(rows), slots, width, device=device, dtype=dtype)
        load("triton", "routed_gate_up")(mine, norm, gate_up, ids, out)
        return ids, weights, out, load("triton", "add_routed")(out, down, ids, weights, mine)

    together = results(list(range(4)))
    for rows in ([3], [2, 1], [3, 0, 2]):
        for whole, part in zip(together, results(rows)):
            assert torch.equal(whole[rows], part)


SIZES = """
import itertools, pathlib, subprocess, sys, tempfile
import torch, triton
sys.path.insert(0, "tests/kernels")
import aot
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.triton import experts

compile, tool = triton.compile, pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

def measured(*given, **named):
    made = compile(*given, **named)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    (line,) = [line for line in (said.stdout + said.stderr).splitlines() if "STACK" in line]
    print(made.metadata.name, *[word for word in line.split() if word.startswith(("STACK", "LOCAL"))])

triton.compile, triton.runtime.jit.JITFunction.run = measured, aot.compile_instead
for (E, S, H, I), dependent in itertools.product(((128, 8, 2048, 768), (8, 2, 4096, 14336)), (0, 1, 2)):
    x, norm, router = torch.zeros(1, H), Norm(torch.zeros(H).bfloat16(), 1e-6), torch.zeros(E, H).bfloat16()
    ids, weights, count = torch.zeros(1, S).int(), torch.zeros(1, S), torch.zeros(1).int()
    some = 64  # rows of a weight, whose number is no constant of the kernel
    gate_up, down = torch.zeros(1, 2 * some, H).bfloat16(), torch.zeros(1, some, I).bfloat16()
    experts.route(x, norm, router, True, torch.zeros(1, E), count, ids, weights, dependent)
    experts.routed_gate_up(x, norm, gate_up, ids, torch.zeros(1, S, some).bfloat16(), dependent)
    experts.add_routed(torch.zeros(1, S, I).bfloat16(), down, ids, weights, torch.zeros(1, some), dependent)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")
def test_nothing_spills_at_the_sizes_of_real_models():
    """Qwen3-30B-A3B and Mixtral-8x7B, in every mode of launch, compiled for compute capability 9.0."""
    printed = apart(SIZES)
    names = ("_route_kernel", "_routed_gate_up_kernel", "_add_routed_kernel")
    assert printed.splitlines() == [f"{name} STACK:0 LOCAL:0" for _ in range(6) for name in names]


def test_wrong_arguments_are_named(device):
    x, norm, router = (
        torch.zeros(2, 64, device=device),
        Norm(torch.ones(64, device=device), 1e-5),
        torch.zeros(8, 64, device=device),
    )
    gate_up, down = torch.zeros(8, 32, 64, device=device), torch.zeros(8, 64, 16, device=device)
    ids, weights = torch.zeros(2, 3, device=device, dtype=torch.int32), torch.zeros(2, 3, device=device)
    logits, count = torch.zeros(2, 8, device=device), torch.zeros(2, device=device, dtype=torch.int32)
    h = torch.zeros(2, 3, 16, device=device)
    refusals(
        "kernels/experts:wrong_arguments_are_named",
        lambda: kernels.route(x.half(), norm, router, True, logits, count, ids, weights),
        lambda: kernels.route(x, norm._replace(offset=1.0), router, True, logits, count, ids, weights),
        lambda: kernels.route(x, norm, router[:2], True, logits, count, ids, weights),
        lambda: kernels.route(x, norm, router, True, logits, count[:1], ids, weights),
        lambda: kernels.route(x, norm, router, True, logits, count, ids.long(), weights),
        lambda: kernels.routed_gate_up(x, norm, gate_up[:, :, :32], ids, h),
        lambda: kernels.routed_gate_up(x, norm._replace(offset=1.0), gate_up, ids, h),
        lambda: choose_experts(weights, None, None, None, 1.0, ids, weights),
        lambda: kernels.routed_gate_up(x, norm, gate_up, ids, h, limit=0.0),
        lambda: kernels.routed_gate_up(x, norm, gate_up, ids[:1], h),
        lambda: kernels.routed_gate_up(x, norm, gate_up, ids, h[:, :2]),
        lambda: kernels.add_routed(h, gate_up, ids, weights, x),
        lambda: kernels.add_routed(h[:, :2].contiguous(), down, ids, weights, x),
        lambda: kernels.add_routed(h, down, ids, weights.half(), x),
        lambda: kernels.add_routed(h, down, ids, weights, x[:1]),
    )
