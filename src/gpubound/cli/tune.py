"""Search launch plans for this GPU and a model's shapes, and keep those that win.

Every op of a training step and of a decoding step is run at the model's own widths, under each plan that the GPU may run well.
What beats the plan of today by more than the noise is kept in the user's cache under the GPU's name; from then on all programs
of this user on such a GPU take it.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from .. import kernels, measure
from ..device import chip, resolve
from ..errors import MeasureError
from ..kernels import plans
from ..kernels.plans import Job, Plan, candidates
from ..kernels.plans.searched import keep, place
from ..measure import Prepared
from ..models.folder import dtype_of, read_config
from ..models.llama.decoder import DecoderConfig
from ..models.llama.weights import config_of
from ..trace import say
from . import arguments

TOKENS, SEQUENCE, LOSS_ROWS = 8192, 1024, 1024  # of a training step's ops
FEW_ROWS = 8  # of a decoding step, that are multiplied together
WIN = 1.02  # the least that a plan must be faster by, its interval's lower end
AGREES = 2e-2  # the most that results may lie apart, relative: plans add in different orders


@dataclass(frozen=True)
class Tune:
    """Search launch plans for this GPU and a model's shapes, and keep those that win.

    CHECKPOINT is a folder with a config.json; its weights are not read. Plans are kept in the user's cache, for GPUs of this
    name; gpubound env lists them. Exit code 3: there is no GPU to search on.

    Example: gpubound tune path/to/checkpoint --seconds 120
    """

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """A model's folder."""
    device: str = "auto"
    """Search on this GPU: auto, require, cuda or cuda:<index>."""
    seconds: float = 300.0
    """The time limit. After it no more plans are tried."""
    json: bool = False
    """Print one JSON document instead of a line for each search."""


@dataclass(frozen=True)
class Found:
    """What a search has found out about one job."""

    job: Job
    plan: Any  # the fastest
    tried: int
    today_us: float
    us: float
    won: bool

    def row(self) -> dict[str, Any]:
        """As it is kept."""
        bucket = plans.RULES[self.job.op].bucket(self.job)
        key = {"op": self.job.op, "way": self.job.way, "shape": list(bucket), "bytes": self.job.bytes}
        return key | {"plan": list(self.plan), "us": round(self.us, 2), "today_us": round(self.today_us, 2)}

    def line(self) -> str:
        shape = "x".join(map(str, self.job.shape))
        end = f"{self.today_us / self.us:.2f} times as fast: {tuple(self.plan)}" if self.won else "stays as it is"
        head = f"{self.job.op} {self.job.way} {shape}".replace("  ", " ")
        return f"{head}: {self.tried} plans, {self.today_us:.1f} -> {self.us:.1f} us, {end}"


def main(argv: Sequence[str]) -> int:
    options = arguments(Tune, argv, "tune")
    folder = Path(options.checkpoint)
    about = read_config(folder)
    config, dtype = config_of(about, folder), dtype_of(about, folder)
    device = resolve(options.device)
    if device.type != "cuda":
        raise MeasureError("plans are searched by the clock of a GPU, and there is none here; run this on the machine to tune.")
    place(name := chip(device).name)
    found = search_all(config, dtype, device, options.seconds)
    won = [one.row() for one in found if one.won]
    path = str(keep(name, won)) if won else None
    if options.json:
        print(json.dumps({"gpu": name, "file": path, "searched": len(found), "won": won}, indent=1))
    else:
        print("\n".join(one.line() for one in found))
        print(f"{len(won)} of {len(found)} searches on {name} won{f'; kept in {path}' if path else ''}")
    return 0


def search_all(config: DecoderConfig, dtype: torch.dtype, device: torch.device, seconds: float) -> list[Found]:
    """Search for the jobs of every work in turn; each gets its share of the time that is left."""
    until = time.monotonic() + seconds
    todo = [(job, work) for work in works(config, dtype, device) for job in jobs_of(work)]
    found: dict[Job, Found] = {}
    for i, (job, work) in enumerate(todo):
        if job in found:
            continue
        share = max(0.0, until - time.monotonic()) / (len(todo) - i)
        found[job] = search(job, work, device, share)
        say(f"tune {i + 1}/{len(todo)}: {found[job].line()}")
    return list(found.values())


def works(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Iterator[Prepared]:
    """The ops of a training step, forward and backward apart, then those of a decoding step of one row and of a few."""

    def draw(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device, dtype=kind)

    hidden, size, total = config.hidden, config.head_dim, config.heads + 2 * config.kv_heads
    x, weight = draw(TOKENS, hidden), draw(hidden)
    cos, sin = draw(2, SEQUENCE, size // 2, kind=torch.float32)
    packed = draw(max(1, TOKENS // SEQUENCE), SEQUENCE, total * size)
    logits, labels = draw(LOSS_ROWS, config.vocabulary), torch.zeros(LOSS_ROWS, dtype=torch.long, device=device)
    for op, inputs in (
        (kernels.rms_norm, [x, weight]),
        (lambda x, w: kernels.add_rms_norm(x, x.detach(), w), [x, weight]),
        (lambda qkv: kernels.rope_qkv(qkv, cos, sin, config.heads, config.kv_heads), [packed]),
        (kernels.swiglu, [draw(TOKENS, 2 * config.intermediate)]),
        (lambda z: kernels.cross_entropy(z, labels), [logits]),
    ):
        yield _forward(op, inputs)
        yield _backward(op, inputs)
    del x, packed, logits
    row, norm, wide = draw(1, hidden, kind=torch.float32), kernels.Norm(weight, 1e-5), config.intermediate
    q, k, v = draw(config.heads * size, hidden), *draw(2, config.kv_heads * size, hidden).unbind(0)
    out, down, gate, up = draw(hidden, config.heads * size), draw(hidden, wide), draw(wide, hidden), draw(wide, hidden)
    attended, activated = draw(1, config.heads * size), draw(1, wide)
    yield Prepared(row.zero_, lambda x: kernels.norm_product(x, norm, q, k, v))
    yield Prepared(row.zero_, lambda to: kernels.add_product(attended, out, None, to))
    yield Prepared(row.zero_, lambda x: kernels.norm_gate_up(x, norm, gate, up))
    yield Prepared(row.zero_, lambda to: kernels.add_product(activated, down, None, to))
    if dtype != torch.bfloat16:
        return  # decode/ways.py
    rows, stream = draw(FEW_ROWS, hidden), draw(FEW_ROWS, hidden, kind=torch.float32)
    mixed, gated = draw(FEW_ROWS, config.heads * size), draw(FEW_ROWS, wide)
    yield Prepared(lambda: rows, lambda x: kernels.tiled_norm_product(x, norm, q, k, v))
    yield Prepared(stream.zero_, lambda to: kernels.tiled_add_product(mixed, out, None, to))
    yield Prepared(lambda: rows, lambda x: kernels.tiled_norm_gate_up(x, norm, gate, up))
    yield Prepared(stream.zero_, lambda to: kernels.tiled_add_product(gated, down, None, to))


def _forward(op: Callable, inputs: list[Tensor]) -> Prepared:
    return Prepared(lambda: inputs, torch.no_grad()(lambda given: op(*given)))


def _backward(op: Callable, inputs: list[Tensor]) -> Prepared:
    def prepare() -> tuple:
        leaves = [t.detach().requires_grad_() for t in inputs]
        result = op(*leaves)
        outputs = result if isinstance(result, tuple) else (result,)
        return outputs, leaves, [torch.ones_like(t) for t in outputs]

    return Prepared(prepare, lambda state: torch.autograd.grad(*state))


def jobs_of(work: Prepared) -> list[Job]:
    """The jobs whose plans a work asks for while it is timed."""
    measure.run_once(work)  # with the self-test of its op, whose jobs are others
    state = work.prepare()
    return plans.asked_by(lambda: work.run(state))


def search(job: Job, work: Prepared, device: torch.device, seconds: float) -> Found:
    """Time the candidates, then the fastest that is right once more beside the plan of today."""
    until, today = time.monotonic() + seconds, plans.plan_for(job)
    gpu = device.type == "cuda"
    clock: dict[str, Any] = {"cold_l2": gpu, "host_ahead": gpu, "device": device}
    timed: dict[Plan, float] = {}
    for plan in dict.fromkeys([today, *candidates(job)]):
        if timed and time.monotonic() > until:
            break
        try:
            timed[plan] = measure.time(under(job, plan, work), warmup=1, runs=5, **clock).median_s
        except Exception as error:  # a candidate may ask for anything; the search goes on without it, and says so
            say(f"tune: {job.op} {tuple(plan)} cannot run: {type(error).__name__}")
    want = _tensors(measure.run_once(under(job, today, work)))
    right = (p for p in sorted(timed, key=timed.__getitem__) if _agree(_tensors(measure.run_once(under(job, p, work))), want))
    best = next(right, today)
    if best == today:
        return Found(job, today, len(timed), 1e6 * timed[today], 1e6 * timed[today], False)
    final = measure.compare({"best": under(job, best, work), "today": under(job, today, work)}, rounds=20, warmup=1, **clock)
    seconds_of = {name: 1e6 * timing.median_s for name, timing in final.timings.items()}
    return Found(job, best, len(timed), seconds_of["today"], seconds_of["best"], final.ratios["today"].low > WIN)


def under(job: Job, plan: Plan, work: Prepared) -> Prepared:
    """The work with that plan for the job."""

    def tried(state: Any) -> Any:
        with plans.trying(job, plan):
            return work.run(state)

    return Prepared(work.prepare, tried)


def _tensors(result: Any) -> list[Tensor]:
    found = result if isinstance(result, tuple | list) else [result]
    return [t.detach().float().clone() for t in found if t is not None]


def _agree(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(float((a - b).norm()) <= AGREES * float(b.norm()) for a, b in zip(got, want, strict=True))
