"""Launch plans: which one a job gets on which GPU, that it fits there, and what a launch does that finds it does not."""

import inspect

import pytest
import torch
from triton.runtime.errors import OutOfResources

from gpubound import trace
from gpubound.device import INTERPRETED, Chip, chip
from gpubound.kernels import plans
from gpubound.kernels.dispatch import WIDEST
from gpubound.kernels.plans import Job, defaults, fits, plan_for
from gpubound.kernels.plans.types import AttentionPlan, MatrixPlan, RopePlan, RowPlan, TilePlan
from gpubound.kernels.registry import every
from gpubound.kernels.triton._launch import launch
from gpubound.models.richards.kernels.plans import StridePlan, WalkPlan
from tests.kernels import plans_fit
from tests.messages import message

SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
CHIPS = {capability: Chip(capability, shared, 132, "") for capability, shared in SHARED.items()}
H200, ADA = CHIPS[90], CHIPS[89]
NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "dynamic_tanh", "add_dynamic_tanh")


def test_the_interpreter_stands_for_an_h200():
    assert chip(torch.device("cpu")) == INTERPRETED
    assert INTERPRETED[:2] == H200[:2]


def test_the_rule_bounds_the_partial_sums():
    """On an architecture that nobody has searched."""
    assert plan_for(Job("rms_norm", "backward", (1024, 1), 2, CHIPS[100])) == RowPlan(rows=4, each=8, warps=2)
    for cols in (1, 64, 576, 4096, 16384):
        job = Job("layer_norm", "backward", (cols, 2), 2, CHIPS[100])
        plan = plan_for(job)
        assert plan.each * 132 * cols * 2 * 4 <= max(defaults.PARTIAL_BYTES, 132 * cols * 2 * 4)
        assert plan.rows * plans.power_of_two(cols) <= 32 * 32 * plan.warps, "more than 32 elements a thread"


def test_a_searched_plan_is_of_one_op_way_and_architecture():
    want = RowPlan(2, 2, 4, 4)
    assert plan_for(Job("rms_norm", "backward", (1000, 1), 2, H200)) == want
    for other in (
        Job("rms_norm", "forward", (1000, 0), 2, H200),
        Job("add_rms_norm", "backward", (1000, 1), 2, H200),
        Job("rms_norm", "backward", (1025, 1), 2, H200),
        Job("rms_norm", "backward", (1000, 1), 2, CHIPS[100]),
    ):
        assert plan_for(other) != want, other


def test_a_searched_product_is_of_16_bit_weights():
    assert plan_for(Job("product", "add", (4096, 4096, 4096), 2, H200)) == MatrixPlan(4, 512, 2)
    assert plan_for(Job("product", "add", (4096, 4096, 4096), 4, H200)) == MatrixPlan(4, 2048, 4)


def test_a_product_with_adapters_takes_what_was_found_without_them_where_nothing_else_was():
    plain, adapted = (Job("product", way, (8192, 2048, 8192), 2, H200) for way in ("gate_up", "adapted gate_up"))
    assert plan_for(adapted) == plan_for(plain) != defaults.product(plain)
    assert plan_for(Job("product", "adapted qkv", (3072, 2048, 2048, 512, 512), 2, H200)) == MatrixPlan(8, 1024, 2)
    assert plan_for(Job("product", "qkv", (3072, 2048, 2048, 512, 512), 2, H200)) == MatrixPlan(4, 1024, 4)
    assert defaults.product(adapted._replace(way="adapted head")) == defaults.product(plain._replace(way="head"))


def test_a_large_weight_whose_columns_are_no_power_of_two_is_read_by_tiles_that_divide_them():
    """Not one that a wave of programs holds, nor where few columns of a tile are masked."""
    for way, shape, want in (
        ("gate_up", (10_240, 2560, 10_240), MatrixPlan(8, 512, 4)),
        ("qkv", (4096, 2560, 2048, 1024, 1024), MatrixPlan(8, 512, 4)),
        ("gate_up", (8192, 3072, 8192), MatrixPlan(4, 1024, 4)),
        ("add", (2560, 10_240, 2560), MatrixPlan(2, 4096, 4)),
        ("qkv", (256, 2560, 256), MatrixPlan(2, 4096, 4)),
        ("add", (1024, 3072, 1024), MatrixPlan(2, 4096, 4)),
        ("gate_up", (9216, 2304, 9216), MatrixPlan(1, 4096, 4)),
        ("adapted gate_up", (10_240, 2560, 10_240), MatrixPlan(1, 4096, 4)),
    ):
        assert defaults.product(Job("product", way, shape, 2, H200)) == want, (way, shape)


def test_no_program_spans_two_parts_of_a_product():
    assert plan_for(Job("product", "qkv", (42, 640, 32, 5, 5), 2, H200)).rows == 1
    assert plan_for(Job("product", "qkv", (48, 640, 32, 8, 8), 2, H200)).rows == 8


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("op", NORMS)
def test_every_norm_fits_every_gpu(op, capability):
    for width in (64, 1024, 2049, 4096, 8192, 16384, WIDEST):
        for size in (2, 4):
            for way, sums in (("forward", 0), ("backward", 2)):
                job = Job(op, way, (width, sums), size, CHIPS[capability])
                assert plan_for(job).shared(job) + plans.SPARE <= SHARED[capability], job


def test_what_a_searched_norm_asks_for():
    """The figures that the compiler gave for sm_90: 131,152 and 196,752 bytes, reductions included."""
    for op, bytes_ in (("rms_norm", 131_072), ("add_rms_norm", 196_608)):
        job = Job(op, "backward", (4096, 1), 4, H200)
        plan = plan_for(job)
        assert plan.stages == 3 and plan.shared(job) == bytes_
        assert not fits(job._replace(chip=ADA), plan)


def test_attention_takes_what_was_found_for_as_many_heads_of_keys():
    searched = [plan_for(Job("decode_attention", "", (4, 32, heads, 2), 2, H200)) for heads in (4, 8, 2)]
    assert searched == [AttentionPlan(64, 2, 4), AttentionPlan(64, 2, 8), AttentionPlan(64, 3, 4)]
    several = [
        plan_for(Job("decode_attention", "several", (4, half, heads, 2), 2, H200)) for heads in (4, 8) for half in (32, 64)
    ]
    assert several == [AttentionPlan(64, 3, 4)] * 2 + [AttentionPlan(32, 3, 2)] * 2


def test_what_attention_asks_for():
    """As compiled. 143,360 and 141,312 bytes are too much for a 4090: one tile less in flight gives the same bits. Heads of
    256 take smaller tiles where a row's keys are shared by programs."""
    for way, half, size, bytes_ in (("", 64, 4, 143_360), ("many", 128, 2, 141_312)):
        job = Job("decode_attention", way, (4, half, 8, size), size, H200)
        assert plan_for(job) == AttentionPlan(64, 3, 4) and plan_for(job).shared(job) == bytes_
        assert plan_for(job._replace(chip=ADA)) == AttentionPlan(64, 2, 4)
        assert plan_for(job._replace(chip=CHIPS[80])) == AttentionPlan(64, 3, 4)
    job = Job("decode_attention", "", (2, 128, 4, 2), 2, H200)
    assert plan_for(job) == plan_for(job._replace(chip=ADA)) == AttentionPlan(32, 3, 8) and plan_for(job).shared(job) == 74_752
    for capability in SHARED:  # heads of 256 in fp32
        job = Job("decode_attention", "", (4, 128, 8, 4), 4, CHIPS[capability])
        assert fits(job, plan_for(job))


@pytest.mark.parametrize("keys, stages, bytes_", [(64, 3, 214_016), (64, 2, 180_736), (32, 3, 115_200), (32, 2, 98_560)])
def test_what_attention_over_codes_asks_for(keys, stages, bytes_):
    """Compiled for sm_89: int8 codes of heads of 256, multiplied in fp32; in bf16 three tiles take 76,800 bytes."""
    job = Job("decode_attention", "", (2, 128, 8, 4), 1, ADA)
    assert 0 <= AttentionPlan(keys, stages, 4).shared(job) - bytes_ <= plans.SPARE
    assert AttentionPlan(64, 3, 4).shared(Job("decode_attention", "", (2, 128, 8, 2), 1, ADA)) == 76_800


@pytest.mark.parametrize(
    "plan",
    [
        RowPlan(4, 2, 4, 3),
        TilePlan(4096, 4),
        StridePlan(1024, 8, 4, 3),
        MatrixPlan(8, 512, 4),
        RopePlan(16, 1, 2),
        AttentionPlan(64, 3, 4),
        WalkPlan(128, 64, 3, 8),
    ],
)
def test_every_ladder_ends(plan):
    steps = 0
    while (smaller := plan.smaller()) is not None:
        assert smaller != plan
        plan, steps = smaller, steps + 1
    assert 1 <= steps < 20


def failing(times: int):
    """A launch that asks for too much that often, and what it was given."""
    given = []

    def run(plan):
        given.append(plan)
        if len(given) <= times:
            raise OutOfResources(2**20, 101_376, "shared memory")
        return "ran"

    return run, given


@pytest.fixture
def settled(monkeypatch):
    monkeypatch.setattr(plans, "_settled", {})
    monkeypatch.setattr(trace, "_printed", set())


def test_a_launch_that_does_not_fit_takes_the_next_smaller_plan(settled, capsys):
    job = Job("rms_norm", "backward", (4096, 1), 2, H200)
    counted = []
    run, given = failing(2)
    with trace.listening(lambda *what: counted.append(what)), trace.strict():
        assert launch(job, run) == "ran"
    assert given == [RowPlan(2, 1, 8, 3), RowPlan(2, 1, 8, 2), RowPlan(2, 1, 8, 1)]
    assert plan_for(job) == given[-1]  # remembered
    assert counted == [("smaller plan", 1)] * 2
    said = capsys.readouterr().err
    assert message("kernels/plans:a_launch_that_does_not_f").within(said) and "(2, 1, 8, 1, '')" in said


def test_when_nothing_fits_the_launch_says_so(settled):
    """Its self-test hears it, and the call takes the reference."""
    run, given = failing(10**6)
    with pytest.raises(OutOfResources):
        launch(Job("rms_norm", "backward", (4096, 1), 2, H200), run)
    assert given[-1].smaller() is None


def test_a_search_hears_of_a_plan_that_does_not_fit(settled, monkeypatch):
    job = Job("rms_norm", "backward", (4096, 1), 2, H200)
    monkeypatch.setitem(plans.TRIED, ("rms_norm", "backward", (4096,)), RowPlan(8, 1, 8, 4))
    run, given = failing(1)
    with pytest.raises(OutOfResources):
        launch(job, run)
    assert given == [RowPlan(8, 1, 8, 4)]


def test_every_shape_of_make_plans_is_one_that_its_op_draws():
    """`make plans` would fail on it otherwise, minutes later."""
    ops = every()
    assert plans_fit.SHAPES.keys() <= ops.keys()
    for op, shapes in plans_fit.SHAPES.items():
        for shape in shapes:
            inspect.signature(ops[op].example).bind(torch.Generator(), *shape)
