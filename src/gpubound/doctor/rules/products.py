"""Matrix products and attention that leave the tensor cores idle."""

import re
from collections.abc import Iterator

from ...watch.site import Place
from ..claim import Claim, StallRule, estimate
from ..evidence import Evidence
from ..lines import by_line, line_of, taped, times
from ..prices import Prices

SHARE = 0.05  # of a step: what it would gain is known to a factor alone
FP32 = re.compile("sgemm|f32f32_f32f32_f32")  # TF32's names have s1688gemm or f32f32_tf32f32
TF32_GAIN = 0.85  # H200: 0.87 of 4096 x 4096 x 4096 and 0.85 of 8192; 0.59 of 1024, which is mostly launch
UNALIGNED = re.compile("(f16|h[0-9]).*align[12](?![0-9])")
ALIGNED_GAIN = 0.75  # H200, beside 4096 x 4096 x 4096: 0.81 of 4097, 0.72 of 4098, 0.73 of 4100
PAD = "pad the sizes of weights and batches to multiples of 8"
SORTS = ((FP32, TF32_GAIN, "in fp32 without tensor cores", ""), (UNALIGNED, ALIGNED_GAIN, "of unaligned sizes", PAD))
OPS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})
MATH = "_scaled_dot_product_attention_math"
SOFTMAX = frozenset({"_safe_softmax"})
MATH_GAIN = 1.9  # of its forward, for both ways: 1.85 to 2.05 on an H200, 512 to 2048 tokens, heads of 64 and 128


def busiest(evidence: Evidence, ops: frozenset[str]) -> Place:
    """The line that runs most of these ops, not counting backward."""
    lines = [[row for row in rows if row.what in ops and not row.place.node] for rows in by_line(evidence, "launch")]
    rows = max(lines, key=lambda rows: times(evidence, rows), default=[])
    return rows[0].place if rows else Place()


def products(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    tape = evidence.tape
    if tape is None:
        return
    own = line_of(busiest(evidence, SOFTMAX)) if any(MATH in span.name for span in tape.spans) else None  # attention's own line
    for names, gain, said, fix in SORTS:
        works = [work for work in tape.work if work.kind == "kernel" and names.search(work.name)]
        numbers = {work.correlation for work in works} - {0}
        ms = prices.without_work([n for n, call in enumerate(tape.calls) if call.correlation in numbers], gain)
        place = busiest(evidence, OPS)
        if (prices.share(ms) or 0.0) >= SHARE and (line_of(place) is None or line_of(place) != own):
            count = len(works) / taped(evidence)
            spent = sum(work.end - work.start for work in works) / taped(evidence) / 1e3
            told = f"{count:.3g} products a step {said} take {spent:.3g} ms"
            yield estimate("precision", place, count, told, ms, fix)


def attention(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    spans = [n for n, span in enumerate(evidence.tape.spans) if MATH in span.name] if evidence.tape else []
    if count := len(spans) / taped(evidence):
        ms = prices.without_work(prices.inside(lambda span: MATH in span.name), MATH_GAIN, spans)
        place = busiest(evidence, SOFTMAX)
        yield estimate("attention", place, count, f"{count:.3g} calls a step write all scores to memory", ms)


RULES = (
    StallRule(
        "products",
        ("precision",),
        "products in fp32 without tensor cores, or of unaligned sizes",
        f"{SHARE:.0%} of the step, estimated",
        "what it would gain is known to a factor alone",
        products,
    ),
    StallRule(
        "attention",
        ("attention",),
        "scaled_dot_product_attention on its math path",
        "0.5 % of the step, estimated",
        "the math path of a small input is as fast as any",
        attention,
    ),
)
