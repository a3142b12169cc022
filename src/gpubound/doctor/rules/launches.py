"""More launches than the work needs."""

from collections.abc import Iterator

from ...watch.site import Place
from ..claim import Claim, StallRule, estimate
from ..evidence import Evidence
from ..lines import by_line, taped, times
from ..prices import Prices, named

MANY = 16  # a step: a small model's parameters; few lines run one in-place op as often for another reason
BOUND = 0.10  # of a step: below it a graph gains less than its fixed shapes cost in work
FUSED = 0.55  # of AdamW one by one, which passes over memory 21 times, fused 7. H200: 0.47 to 0.58 of tensors of 8M to 50M
FEW = 0.9  # of the host's time in an update by parameters; H200: 0.90 to 0.96 of 64 and of 400 small tensors
ADDED = 4.0  # passes over memory for one that fills with zeros: that one, and three to add a gradient to it
NORMS = frozenset({"linalg_vector_norm", "norm"})
ZEROS = frozenset({"_foreach_zero_", "zero_", "fill_"})
OPTIMIZERS = "torch/optim/"
FUSIBLE = ("adam", "sgd", "adagrad")


def optimizer(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    for rows in by_line(evidence, "launch"):
        mine = [row for row in rows if row.place.via and row.place.via.function.startswith("_single_tensor_")]
        if (count := times(evidence, mine)) >= MANY and (via := mine[0].place.via):
            ms = fused(evidence, prices)
            fix = "" if any(name in via.function for name in FUSIBLE) else "build the optimizer with foreach=True"
            yield estimate("optimizer", mine[0].place, count, f"{count:.3g} launches a step", ms, fix)


def fused(evidence: Evidence, prices: Prices) -> float | None:
    """What a fused update would save: the greater of its passes over memory and of its launches."""
    spans = [n for n, span in enumerate(evidence.tape.spans) if span.kind == "optimizer"] if evidence.tape else []
    calls = prices.inside(lambda span: span.kind == "optimizer")
    work, (host, _) = prices.without_work(calls, FUSED, spans), prices.saved(calls, spans)
    return None if work is None or host is None else max(work, FEW * host)


def zeros(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    for rows in by_line(evidence, "launch"):
        mine = [r for r in rows if r.what in ZEROS and r.place.via and r.place.via.function == "zero_grad"]
        if mine:
            ms = prices.without_work(prices.inside(named(f"aten::{mine[0].what}")), ADDED)
            yield estimate("zero_grad", mine[0].place, times(evidence, mine), "zero_grad(set_to_none=False)", ms)


def loops(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    for rows in by_line(evidence, "launch"):
        for row in rows:
            inplace = row.what.endswith("_") and not row.what.startswith("_")
            count = times(evidence, [row])
            if (inplace or row.what in NORMS) and count >= MANY and not row.place.node and row.place.via is None:
                fix = f"one call for all of them: torch._foreach_{'norm' if row.what in NORMS else row.what}"
                said = f"{row.what} {count:.3g} times a step"
                yield estimate("launch", row.place, count, said, prices.of_launches(count), fix)
                break


def bound(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    """What is left of the host's time when it never stalls. A graph costs one launch."""
    ceiling, alone = prices.ceiling, prices.launch_free
    if ceiling is None or alone is None or prices.step_ms is None or evidence.tape is None:
        return
    if ceiling - alone >= BOUND * prices.step_ms:
        launches = sum(call.kind == "launch" for call in evidence.tape.calls) / taped(evidence)
        said = f"{launches:.0f} launches a step; as a graph it would take the device's {alone:.3g} ms"
        yield Claim("launch_bound", updating(evidence), launches, said, ms=ceiling - alone, certainty="replayed")


def updating(evidence: Evidence) -> Place:
    """The line that ends a step: the one from which an optimizer launches most."""
    every = by_line(evidence, "launch")
    lines = [[row for row in rows if row.place.via and OPTIMIZERS in row.place.via.file] for rows in every]
    rows = max(lines, key=lambda rows: times(evidence, rows), default=[])
    return rows[0].place if rows else Place()


RULES = (
    StallRule(
        "optimizer",
        ("optimizer",),
        "an optimizer that updates parameter by parameter",
        f"{MANY} launches a step",
        "a small model's parameters; foreach and fused need a few",
        optimizer,
    ),
    StallRule("zeros", ("zero_grad",), "zero_grad(set_to_none=False)", "one", "gradients made anew cost nothing", zeros),
    StallRule(
        "loops",
        ("launch",),
        "loops over parameters, one launch each",
        f"an in-place op or a norm {MANY} times a step on one line",
        "a forward runs few in-place ops, and its layers' lines go through torch/nn",
        loops,
    ),
    StallRule(
        "bound",
        ("launch_bound",),
        "steps that launches hold up",
        f"{BOUND:.0%} of the step, by replay",
        "below that a graph gains less than its fixed shapes cost in work",
        bound,
    ),
)
