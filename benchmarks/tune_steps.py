"""Search for the launch plans of a decoding step on this GPU, by the time of whole steps.

    python -m benchmarks.tune_steps --shape 1b --seconds 300
    python -m benchmarks.tune_steps --shape 8b --behind 4096 --ops decode_attention

The kernels of a step overlap, so a plan that wins alone may lose in its place. For each plan tried a decoder is captured anew,
and its steps are timed. A search goes from the plan of today to its neighbours, which differ in one number by a factor of two,
and on from the first that wins. What a job has won stays in place for the jobs behind it, and rounds go on until one changes
nothing. It prints what a step took and takes, and for each job that won the line for kernels/plans/defaults.py.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import gpubound
from gpubound.kernels import plans
from gpubound.kernels.plans import Job, Plan
from gpubound.trace import strict

from .candidates import candidates
from .decode_adapters import RANK, adapted
from .decode_peers import PLACES, PROMPT, prompts
from .plans import table_line
from .shapes import SHAPES

OPS = ("product", "packed_product", "tiled_product", "split_product", "decode_attention")
NEW = 129  # tokens a request: 128 steps behind the first
WIN = 0.997  # of the time before: a plan that is nearer is today's, within the scatter of captures


@dataclass(frozen=True)
class Steps:
    """Which steps are timed."""

    shape: str
    rows: int
    behind: int
    weights: str | None
    adapters: int

    def model(self, device: torch.device) -> Any:
        return adapted(self.shape, device, self.adapters)

    def us(self, model: Any) -> float:
        """Of one step, the median of five requests."""
        with strict():
            decoder = gpubound.decoder(model, self.rows, self.behind + NEW, weights=self.weights, verify=False)  # type: ignore[arg-type]
        ids = prompts(self.shape, self.rows, decoder.body.device)
        ids = ids.repeat(1, -(-self.behind // PROMPT))[:, : self.behind].tolist()
        names = [f"adapter{row % self.adapters}" for row in range(self.rows)] if self.adapters > 1 else None
        given = {} if names is None else {"adapters": names}
        found = []
        for turn in range(7):  # graphs are captured in the first, and a prompt's when its length comes again
            result = decoder.generate(ids, max_new_tokens=NEW, stop=(), **given)
            found += [result.seconds - result.first_token_s] * (turn > 1)
        return 1e6 * statistics.median(found) / (NEW - 1)


@dataclass
class Search:
    """Plans that won so far, by job. `us` times a step under the plans in place."""

    us: Callable[[], float]
    until: float
    won: dict[Job, Plan] = field(default_factory=dict)
    known: dict[tuple, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def time(self, job: Job, plan: Plan) -> float:
        """Of a step with that plan for the job; infinite where it cannot run."""
        tried = {**self.won, job: plan}
        key = tuple(sorted((str(one), tuple(its)) for one, its in tried.items()))
        if key not in self.known:
            try:
                with in_place(tried):
                    self.known[key] = self.us()
            except Exception as error:  # a plan may ask for anything; the search goes on without it, and says so
                self.broken.append(f"{job.op} {job.way} {tuple(plan)}: {type(error).__name__}")
                self.known[key] = float("inf")
        return self.known[key]

    def improve(self, job: Job) -> bool:
        """Go from neighbour to neighbour for as long as one wins. Whether any did."""
        plan, moved = self.won.get(job, plans.plan_for(job)), False
        best, options = self.time(job, plan), neighbours(job, plan)
        while (other := next(options, None)) is not None and time.monotonic() < self.until:
            if (took := self.time(job, other)) < WIN * best:
                plan, best, options, moved = other, took, neighbours(job, other), True
                print(f"  {best:.1f} us  {line(job, plan)}", flush=True)
        if moved:
            self.won[job] = plan
        return moved


def neighbours(job: Job, plan: Plan) -> Iterator[Plan]:
    """The candidates that differ from it in one number, by a factor of two, or by one where it is small."""
    for other in candidates(job):
        apart = [(a, b) for a, b in zip(tuple(plan), tuple(other)) if a != b]  # type: ignore[call-overload]  # named tuples
        if len(apart) == 1 and (max(apart[0]) == 2 * min(apart[0]) or max(apart[0]) - min(apart[0]) == 1):
            yield other


@contextmanager
def in_place(tried: Mapping[Job, Plan]) -> Iterator[None]:
    with ExitStack() as stack:
        for job, plan in tried.items():
            stack.enter_context(plans.trying(job, plan))
        yield


def search_all(us: Callable[[], float], jobs: Sequence[Job], seconds: float) -> Search:
    """Job after job, round after round."""
    search = Search(us, time.monotonic() + seconds)
    moved = True
    while moved and time.monotonic() < search.until:
        moved = sum(search.improve(job) for job in jobs) > 0  # all of them, whichever moved
    return search


def line(job: Job, plan: Plan) -> str:
    return table_line(plans.keys_of(job)[0], plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=[*SHAPES], help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="of a step (default: %(default)s)")
    parser.add_argument("--behind", type=int, default=PROMPT, help="tokens before the steps (default: %(default)s)")
    parser.add_argument("--weights", choices=["int4", "int8", "fp8"], help="packed copies of the weights")
    parser.add_argument("--adapters", type=int, default=0, help=f"of rank {RANK} on the model (default: %(default)s)")
    parser.add_argument("--ops", default=",".join(OPS), help="whose plans are searched, by comma (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="when this is over no more plans are tried (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="JSON file for what was found")
    options = parser.parse_args()
    wanted = options.ops.split(",")
    if unknown := [op for op in wanted if op not in OPS]:
        parser.error(f"--ops: got {unknown[0]}, wanted some of {', '.join(OPS)}")
    if not 1 <= options.behind <= PLACES - NEW:
        parser.error(f"--behind: got {options.behind}, wanted 1 to {PLACES - NEW}")
    if not torch.cuda.is_available():
        parser.error("no GPU is visible: steps are timed on one")
    steps = Steps(options.shape, options.rows, options.behind, options.weights, options.adapters)
    model = steps.model(torch.device("cuda", torch.cuda.current_device()))
    steps.us(model)  # self-tests ask for other plans
    jobs = [job for job in plans.asked_by(lambda: steps.us(model)) if job.op in wanted]
    today = steps.us(model)
    print(f"{steps}: {today:.1f} us a step, {len(jobs)} jobs", flush=True)
    search = search_all(lambda: steps.us(model), jobs, options.seconds)
    with in_place(search.won):
        now = steps.us(model)
    print(f"{today:.1f} -> {now:.1f} us a step; {len(search.known)} steps timed")
    for job, plan in search.won.items():
        print(f"    {line(job, plan)}  # today {tuple(plans.plan_for(job))}")
    for one in search.broken:
        print(f"cannot run: {one}")
    if options.out:
        found = {"steps": str(steps), "today_us": today, "us": now, "won": [line(*one) for one in search.won.items()]}
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
