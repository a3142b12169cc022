"""Every rule fires where its stall is planted, on its line, and is silent on the other side of its threshold."""

from pathlib import Path

import pytest

import gpubound
from gpubound.doctor.finding import KINDS
from gpubound.doctor.record.located import Samples
from gpubound.doctor.record.tape import Span
from gpubound.doctor.rules import compute
from gpubound.doctor.rules.compute import FEW, FUSED
from gpubound.doctor.rules.diagnose import RULES, diagnose
from gpubound.doctor.rules.waits import MASKED, ROUND_TRIP
from gpubound.watch.events import Site, Stack

from .evidences import STEPS, TORCH, at, quiet, replace, row, sampled, seen, steps
from .programs import length

LINE = at(88, "loss.item()")
ITEM = row("sync", "item", LINE)
OP = "torch/optim/adam.py"
BUSY = {Stack((at(9, "y = model(x)").site,)): 50}


def op(loop, name: str, us: float, kind: str = "op", **launch):
    """An op that launches, or computes on the CPU for `us`."""
    start = loop.clock[1]
    if launch:
        loop.launch(**launch)
    loop.think(us)
    loop.spans.append(Span(name, kind, 1, start, loop.clock[1]))
    return loop


def up(detail: str, place, kind: str = "h2d", **more):
    return row(kind, "copy to device", place, detail=detail, bytes=1 << 20, **more)


def copied(host: float, *rows):
    return seen(steps(lambda l: l.copy("h2d", pageable=True).think(host)), *rows, line=rows[0].place, kinds=("copy",))


MANY_ADDS = row("launch", "add_", at(30), 16)
STEP = at(40, "optimizer.step()", OP, "_single_tensor_adamw")
ZERO = at(41, "optimizer.zero_grad(set_to_none=False)", "torch/optim/optimizer.py", "zero_grad")
SAVE = at(50, "torch.save(state, file)", "torch/serialization.py", "_save")
PRODUCT = row("launch", "addmm", at(20))
MATH = "aten::_scaled_dot_product_attention_math"
ON_CPU = row("cpu_op", "mul", at(60), 1)
LAUNCH = row("launch", "add", at(61))


# kind: (evidence in which it is found on a line, evidence in which it is not a finding)
CASES = {
    "read": (
        "sync",
        88,
        seen(steps(lambda l: l.item().think(300)), ITEM, line=LINE),
        seen(steps(lambda l: l.item(), run=600), ITEM, line=LINE),
    ),
    "synchronize": (
        "sync",
        88,
        seen(steps(lambda l: l.sync(None).think(99)), row("sync", "device synchronize", LINE), line=LINE),
        seen(steps(quiet)),
    ),
    "pageable": ("pageable", 5, copied(200, up("pageable, non_blocking", at(5))), copied(0, up("pinned, non_blocking", at(5)))),
    "blocking": ("h2d", 5, copied(200, up("pageable, blocking", at(5))), seen(None, up("pinned, non_blocking", at(5)))),
    "round trip": ("d2h", 5, seen(None, up("pageable, blocking", at(5)), up("pageable, blocking", at(5), "d2h")), seen(None)),
    "repeat": ("repeat", 5, copied(200, up("", at(5), "repeat")), seen(None, up("", at(5), "repeat", a_step=0.5))),
    "clone": (
        "clone",
        6,
        seen(None, row("clone", "clone", at(6), bytes=1 << 20)),
        seen(None, row("clone", "clone", at(6), 0.5)),
    ),
    "data": (
        "data",
        61,
        seen(steps(lambda l: l.sync().doing("data", 900, "loader")), named_lines={"loader": at(61)}),
        seen(steps(lambda l: l.doing("data", 900, "loader")), named_lines={"loader": at(61)}),
    ),
    "gc": (
        "gc",
        7,
        seen(steps(lambda l: l.sync().doing("gc", 900)), row("gc", "generation 2", at(7, "gc.collect()"))),
        seen(None, row("gc", "generation 2", at(7))),
    ),
    "compile": (
        "compile",
        8,
        seen(steps(lambda l: l.sync().doing("compile", 900)), row("compile", "recompile 0/1", at(8))),
        seen(steps(quiet)),
    ),
    "checkpoint": (
        "checkpoint",
        50,
        seen(steps(lambda l: l.sync().doing("checkpoint", 900)), row("d2h", "copy to host", SAVE)),
        seen(steps(lambda l: l.doing("checkpoint", 10)), row("d2h", "copy to host", SAVE)),
    ),
    "malloc": (
        "alloc",
        9,
        seen(steps(lambda l: l.stop("alloc", 500)), row("alloc", "cudaMalloc", at(9))),
        seen(steps(lambda l: l.stop("alloc", 500)), row("alloc", "cudaMalloc", at(9)), memory={"alloc": 0.1}),
    ),
    "free": (
        "free",
        None,
        seen(steps(lambda l: l.stop("free", 500))),
        seen(steps(lambda l: l.stop("free", 500)), memory={"free": 0.0}),
    ),
    "retry": ("retry", 9, seen(None, row("retry", "retry", at(9))), seen(None)),
    "on the CPU": ("cpu_op", 60, seen(None, ON_CPU), seen(None, row("cpu_op", "mul", at(60, via="torch/utils/data/x.py")))),
    "padding": ("cpu_op", 60, seen(None, ON_CPU), seen(None, row("cpu_op", "pad", at(60, via="torch/nn/utils/rnn.py")))),
    "a part on the CPU": (
        "cpu_op",
        60,
        seen(steps(lambda l: op(l.sync(), "aten::mul", 900)), ON_CPU, LAUNCH),
        seen(steps(lambda l: op(l, "aten::mul", 900)), ON_CPU, LAUNCH),
    ),
    "fallback": ("fallback", 3, seen(None, row("fallback", "rms_norm", at(3), detail="no Triton")), seen(None)),
    "loop": ("launch", 30, seen(steps(quiet, run=1.0), MANY_ADDS), seen(steps(quiet, run=600.0), MANY_ADDS)),
    "optimizer": (
        "optimizer",
        40,
        seen(steps(lambda l: op(l, "Optimizer.step#AdamW.step", 0, "optimizer", run=900)), row("launch", "add_", STEP, 16)),
        seen(None, row("launch", "add_", STEP, 15)),
    ),
    "zero_grad": (
        "zero_grad",
        41,
        seen(steps(lambda l: op(l, "aten::_foreach_zero_", 0, run=300)), row("launch", "_foreach_zero_", ZERO)),
        seen(None, row("launch", "_foreach_zero_", at(41))),
    ),
    "launch bound": (
        "launch_bound",
        40,
        seen(steps(quiet, run=2.0), row("launch", "_foreach_add_", STEP), row("launch", "zero_", ZERO, 0.5)),
        seen(steps(quiet, run=4.0)),
    ),
    "host work": (
        "host_work",
        3,
        seen(steps(quiet, run=2.0), samples=sampled({"x = 1": 1, "x = stack": 30}), step_ms=[1.0]),
        seen(steps(quiet, run=2.0), samples=sampled({"x = 1": 1, "x = stack": 1}, 150), step_ms=[1.0]),
    ),
    "fp32": (
        "precision",
        20,
        seen(steps(lambda l: l.launch(run=900, name="ampere_sgemm_128x64_tn")), PRODUCT),
        seen(steps(lambda l: l.launch(run=900, name="cutlass_80_tensorop_s1688gemm_128x64")), PRODUCT),
    ),
    "unaligned": (
        "precision",
        20,
        seen(steps(lambda l: l.launch(run=900, name="cutlass_80_wmma_bf16_s161616gemm_tn_align2")), PRODUCT),
        seen(steps(lambda l: l.launch(run=900, name="cutlass_80_wmma_bf16_s161616gemm_tn_align8")), PRODUCT),
    ),
    "attention": (
        "attention",
        21,
        seen(steps(lambda l: op(l, MATH, 0, run=900)), row("launch", "_safe_softmax", at(21)), PRODUCT),
        seen(steps(lambda l: op(l, "aten::_flash_attention_forward", 0, run=900)), PRODUCT),
    ),
    "comm": (
        "comm",
        None,
        seen(steps(lambda l: l.launch(run=900, kind="comm").sync(), ahead=30)),
        seen(steps(lambda l: l.launch(run=9, kind="comm").sync())),
    ),
    "conversion": (
        "noop",
        13,
        seen(steps(quiet, run=1.0), row("noop", ".to()", at(13), ms=0.1)),
        seen(steps(quiet, run=600.0), row("noop", ".to()", at(13), ms=0.1)),
    ),
    "profiler": ("profiler", None, seen(None, about={"profiler": True}), seen(None, about={"torch": "2.11"})),
}


@pytest.mark.parametrize("name", CASES)
def test_a_stall_is_found_on_its_line_and_what_costs_nothing_is_none(name):
    kind, line, planted, calm = CASES[name]
    found = {finding.kind: finding for finding in diagnose(planted).findings}
    assert kind in found, found
    at_line = found[kind].line
    assert (at_line and at_line.line) == line
    assert found[kind].fix and found[kind].evidence
    assert kind not in [finding.kind for finding in diagnose(calm).findings]


def test_every_kind_of_every_rule_is_planted_here():
    kinds = {kind for kinds in RULES.values() for kind in kinds}
    assert kinds - {"pin"} == {kind for kind, *_ in CASES.values()} and kinds <= set(KINDS)


@pytest.mark.parametrize("run", [30.0, 60.0, 600.0])
def test_nothing_is_found_in_a_clean_loop(run):
    forward = row("launch", "addmm", at(20, via="torch/nn/modules/linear.py"), 48)
    adds = row("launch", "add", at(21), 48)
    foreach = row("launch", "_foreach_add_", at(40, "optimizer.step()", OP, "_multi_tensor_adam"), 12)
    clean = seen(steps(quiet, run=run), forward, adds, foreach, up("pinned, non_blocking", at(5)))
    verdict = diagnose(clean)
    assert not verdict.findings and not verdict.harmless


def test_pauses_are_told_by_their_lines():
    """Python's own collections are one finding, at the costliest line; gc.collect() and each compilation have their own."""

    def body(loop):
        loop.sync().doing("gc", 300, "one").doing("gc", 400, "two").doing("gc", 900, "asked").doing("gc", 50, "young")
        loop.doing("compile", 200, "here").doing("compile", 500, "there").doing("compile", 100, "lost")

    lines = {"one": at(1), "two": at(2), "asked": at(3, "gc.collect()"), "here": at(4), "there": at(5)}
    rows = [row("gc", "generation 2", lines["asked"]), row("compile", "recompile 0/1", lines["here"])]
    found = {f.site.line: (f.kind, f.count, f.ms) for f in diagnose(seen(steps(body), *rows, named_lines=lines)).findings}
    assert {line: (kind, count) for line, (kind, count, _) in found.items()} == {
        2: ("gc", 3.0), 3: ("gc", 1.0), 4: ("compile", 1.0), 5: ("compile", 1.0),
    }  # fmt: skip
    assert {line: ms for line, (*_, ms) in found.items()} == pytest.approx({2: 0.75, 3: 0.9, 4: 0.3, 5: 0.5}, rel=0.05)


def test_a_wait_of_a_copy_is_not_named_twice():
    both = seen(None, up("pageable, blocking", at(5)), row("sync", "copy to device", at(5)), up("", at(5), "repeat"))
    assert [finding.kind for finding in diagnose(both).findings] == ["repeat"]


def test_the_remedy_is_that_of_what_was_called():
    clip = replace(LINE, through="torch/nn/utils/clip_grad")
    fixes = {
        "error_if_nonfinite=False": row("sync", "item", clip),
        "output_size=": row("sync", "repeat_interleave", at(89)),
        "torch.where": row("sync", "boolean mask", at(90)),
        "before the step": up("pageable, blocking", at(91, "torch.tensor([1.0], device=device)")),
    }
    for words, each in fixes.items():
        assert words in diagnose(seen(None, each)).findings[0].fix


def test_the_docs_have_every_rule_with_its_threshold():
    page = (Path(gpubound.__file__).parents[2] / "docs/doctor-how.md").read_text(encoding="utf-8")
    thresholds = {
        compute.optimizer: f"{compute.MANY} launches a step",
        compute.loops: f"{compute.MANY} times a step",
        compute.launch_bound: f"{compute.BOUND:.0%} of the step, by replay",
        compute.work: f"{compute.WORK:.0%} of the step, by samples",
        compute.products: f"{compute.SHARE:.0%} of the step, estimated",
        compute.communication: f"{compute.EXPOSED:.0f} % of the step",
    }
    for rule, kinds in RULES.items():
        rows = [line.split(" | ") for line in page.splitlines() if line.startswith(f"| `{'`, `'.join(kinds)}` | ")]
        assert any(len(row) == 4 and thresholds.get(rule, "") in row[2] for row in rows), (kinds, rows)


def test_an_update_by_parameters_costs_its_launches_or_its_passes():
    """A fused one has one launch: where the device waits for the host, nearly all of the update is saved."""
    small = seen(
        steps(lambda l: op(l, "Optimizer.step#AdamW.step", 800, "optimizer", run=5), run=2), row("launch", "add_", STEP, 16)
    )
    large = seen(steps(lambda l: op(l, "Optimizer.step#AdamW.step", 0, "optimizer", run=900)), row("launch", "add_", STEP, 16))
    ms = [next(f.ms for f in diagnose(evidence).findings if f.kind == "optimizer") for evidence in (small, large)]
    assert ms == pytest.approx([FEW * 0.8, FUSED * 0.9], rel=0.1)


def test_an_emptied_cache_is_filled_again_at_its_cost():
    body = lambda l: l.stop("free", 300).stop("alloc", 200)  # noqa: E731
    emptied = diagnose(seen(steps(body), row("free", "empty_cache", at(9), 0))).findings
    assert [(f.kind, f.line.line) for f in emptied] == [("free", 9)]
    assert emptied[0].ms == pytest.approx((length(steps(body)) - length(steps(quiet))) / STEPS / 1e3, rel=0.1)
    assert {f.kind for f in diagnose(seen(steps(body))).findings} == {"free", "alloc"}
    for grows in (steps(lambda l: l.stop("alloc", 200)), steps(body)):  # nothing was given back, or not in the timed steps
        left = diagnose(seen(grows, row("free", "empty_cache", at(9), 0), memory={"free": 0.0})).findings
        assert [f.kind for f in left] == ["alloc"]


@pytest.mark.parametrize(("index", "priced"), [(False, 0.5 + 0.3), (True, 0.3)])
def test_a_mask_costs_the_kernels_that_gather_and_scatter(index, priced):
    """Indexing by a mask, 300 µs, and its backward, 500, unless that may be the backward of an index without a mask."""

    def body(loop):
        start = loop.clock[1]
        loop.launch(run=150, name="nonzero").launch(run=150, name="gather")
        loop.spans += [Span("aten::index", "op", 1, start, loop.clock[1]), Span("aten::nonzero", "op", 1, start, start + 2)]
        op(loop, "IndexBackward0", 1, run=500)
        if index:
            op(loop, "aten::index", 1, run=10)

    row_ = row("sync", "boolean mask", at(88, "x[x > 0]"))
    (finding,) = diagnose(seen(steps(body), row_, line=at(88))).findings
    with_it, without = (length(steps(each)) for each in (body, quiet))
    assert with_it > without and finding.ms == pytest.approx(MASKED * priced, rel=0.1)


def test_a_distribution_s_checks_cost_what_they_launch(check="distributions/distribution.py", line=LINE.site):
    """Not what the distribution itself launches, and not the checks of another line."""
    place = at(88, line.code, "distributions/categorical.py", "__init__")
    item = row("sync", "item", place, 2)

    def priced(*files: str, line=line):
        late = {Stack((line,), Site(TORCH + file, n, "check", "", n)): 8 for n, file in enumerate(files)}
        evidence = seen(steps(lambda loop: loop.sync()), item, line=place, samples=Samples(late | BUSY, late), step_ms=[4.0])
        verdict = diagnose(evidence)
        (found,) = [each for each in (*verdict.findings, *verdict.harmless) if each.kind == "sync"]
        return found

    checked, alone = priced(check, "distributions/constraints.py"), priced("distributions/categorical.py")
    assert checked.ms == 4.0 * 16 / 66 and checked.certainty == "estimate" and "0.97 ms" in checked.evidence
    other = priced(check, line=at(87).site)
    assert alone.ms == other.ms < checked.ms and alone.certainty == other.certainty == "replayed"


def test_a_round_trip_takes_its_copies_with_it():
    """Keep the tensor on the device, and neither copy is left: 100 µs each way, beside waits that cost no more."""

    def body(loop):
        loop.copy("d2h", run=100, pageable=True).copy("h2d", run=100, pageable=True)

    rows = [up("pageable, blocking", at(5)), up("pageable, blocking", at(5), "d2h")]
    (finding,) = diagnose(seen(steps(body), *rows, line=at(5), kinds=("copy",))).findings
    with_it, without = (length(steps(each)) / STEPS / 1e3 for each in (body, quiet))
    assert finding.fix == ROUND_TRIP and finding.ms == pytest.approx(with_it - without, rel=0.1)


def test_a_loop_of_launches_costs_nothing_where_the_host_is_ahead():
    """But for the tape's first step, which begins with an empty queue."""
    ahead = seen(steps(lambda l: l.launch(run=60, times=16), ahead=4), MANY_ADDS)
    assert [f.ms for f in diagnose(ahead).harmless if f.kind == "launch"] == [pytest.approx(0.0, abs=0.005)]


def test_without_prices_what_was_seen_in_one_step_comes_after_what_every_step_does():
    """An evaluation that fell into the window reads more often than the step does."""
    evaluation, each = row("sync", "item", at(7, "shown(loss.item())"), 50), row("sync", "item", at(9, "best = loss.item()"))
    assert [f.site.line for f in diagnose(seen(None, evaluation, each)).findings] == [7, 9]
    once = seen(None, evaluation, each, once=frozenset({("train.py", 7, "")}))
    assert [f.site.line for f in diagnose(once).findings] == [9, 7]


def test_an_op_that_has_no_form_for_many_tensors_is_no_loop_to_fuse():
    assert diagnose(seen(None, MANY_ADDS)).findings
    assert not diagnose(seen(None, row("launch", "masked_fill_", at(30), 250))).findings
