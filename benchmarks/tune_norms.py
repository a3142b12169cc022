"""Search for the launch plans of the memory-bound kernels on this GPU: norms, rotary embedding, gated activations.

    python -m benchmarks.tune_norms --only layer_norm,group_norm --seconds 300 --out tuned.json

First every candidate is compiled, in as many processes as there are cores. Then each case's candidates are timed side by side
as the benchmark times them (bf16, cold L2, the host ahead, a backward with all that it launches), and the three best once more
beside today's plan and Liger. A line a case: the best plan in microseconds and as a share of the copy rate, its ratio to
today's and to Liger's, and the line for kernels/plans/defaults.py. The figures go into LOG.md.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch

from gpubound import measure
from gpubound.measure import Prepared
from gpubound.trace import strict

from .door import Door
from .harness import _error, _tensors, importable, release
from .plans import OPS, WAYS, Case

FINALISTS = 3
TOLERANCE = 1e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(OPS), help="ops, by comma (default: %(default)s)")
    parser.add_argument("--widths", default="8b,350m", help="by comma (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="by comma (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="when this is over no more plans are timed (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="JSON file for what was found")
    parser.add_argument("--dry", action="store_true", help="tiny sizes in Triton's interpreter: shows that the script runs")
    options = parser.parse_args()
    ops, widths, ways = (text.split(",") for text in (options.only, options.widths, options.ways))
    for option, wanted, known in (("--only", ops, OPS), ("--widths", widths, ("8b", "350m")), ("--ways", ways, WAYS)):
        if unknown := [word for word in wanted if word not in known]:
            parser.error(f"{option}: got {unknown[0]}, wanted some of {', '.join(known)}")
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it as it is imported, which is later
        widths = ["tiny"]
    elif not torch.cuda.is_available():
        parser.error("no GPU is visible: tuning wants one; --dry runs tiny sizes in the interpreter")
    started = time.perf_counter()
    cases = [Case(op, way, width, options.dry) for width, op, way in product(widths, ops, ways)]
    cases = [case for case in cases if not (case.op.startswith("rope") and case.way == "backward" and "forward" in ways)]
    liger = not options.dry and importable("liger_kernel")
    broken = {} if options.dry else compile_all(cases, liger)
    print(f"{len(cases)} cases, {sum(len(case.knob.candidates) for case in cases)} plans; compiled in "
          f"{time.perf_counter() - started:.0f} s, {len(broken)} did not", flush=True)  # fmt: skip
    copy_per_s = measure.ceilings("cpu" if options.dry else "cuda", quick=True).copy_bytes_per_s
    found = []
    for i, case in enumerate(cases):
        share = (options.seconds - (time.perf_counter() - started)) / (len(cases) - i)
        found.append(search(case, broken, liger, share, copy_per_s))
        print(said(found[-1]), flush=True)
        release(case.device)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))


def compile_all(cases: list[Case], liger: bool) -> dict[tuple[Case, Any], str]:
    """Compile every candidate into Triton's cache on disk: (case, plan) -> why it did not compile or launch."""
    jobs = [(case, plan) for case in cases for plan in _distinct(case)] + [(case, None) for case in cases if liger]
    workers = min(len(jobs), max(1, len(os.sched_getaffinity(0)) - 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = list(pool.map(compile_one, jobs, chunksize=4))
    return {job: why for job, why in zip(jobs, outcomes) if why is not None}


def _distinct(case: Case) -> Iterator[Any]:
    """Plans that differ in more than the number of programs, which is no part of a compiled kernel."""
    seen = set()
    for plan in case.knob.candidates:
        if (kernel := _kernel_of(plan)) not in seen:
            seen.add(kernel)
            yield plan


def _kernel_of(plan: Any) -> Any:
    return plan._replace(each=bool(plan.each)) if hasattr(plan, "each") else plan


def compile_one(job: tuple[Case, Any]) -> str | None:
    """Run one sequence of a case with that plan (None: Liger's), in a process of its own: None, or what went wrong."""
    case, plan = job
    door = case.door(batch=1)
    try:
        with strict():
            if plan is not None:
                measure.run_once(getattr(door, case.way)(door.ours))  # its self-test, under today's plan
                measure.run_once(with_plan(case, door, plan))
            elif door.liger is not None:
                measure.run_once(getattr(door, case.way)(door.liger))
        if not case.dry:
            torch.cuda.synchronize()
    except Exception as error:  # a plan may ask for more than there is; the case goes on without it
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return None


def search(case: Case, broken: dict, liger: bool, seconds: float, copy_per_s: float) -> dict:
    """Time the candidates of one case, the best of them once more beside today's plan and Liger's kernel."""
    started, knob, door = time.perf_counter(), case.knob, case.door()
    bad = {_kernel_of(plan): why for (other, plan), why in broken.items() if other == case and plan is not None}
    plans = [plan for plan in dict.fromkeys([knob.today, *knob.candidates]) if _kernel_of(plan) not in bad]
    timed: dict[Any, float] = {}
    for at in range(0, len(plans), 8):
        if timed and time.perf_counter() - started > 0.8 * seconds:
            break
        timed |= contest({plan: with_plan(case, door, plan) for plan in plans[at : at + 8]}, case, 3 if case.dry else 5)
    best = sorted(timed, key=timed.__getitem__)
    finalists = {plan: with_plan(case, door, plan) for plan in dict.fromkeys([*best[:FINALISTS], knob.today])}
    wrong = [plan for plan, work in finalists.items() if not agrees(case, door, work)]
    last: dict[Any, measure.Work] = {plan: work for plan, work in finalists.items() if plan not in wrong}
    if liger and door.liger is not None:
        last["liger"] = getattr(door, case.way)(door.liger)
    final = contest(last, case, 3 if case.dry else 20)
    plan = min((p for p in final if p != "liger"), key=final.__getitem__)
    moved = door.forward_bytes if case.way == "forward" else door.backward_bytes
    return {
        "case": str(case),
        "line": knob.line(plan),
        "us": final[plan] * 1e6,
        "percent_of_copy": 100 * moved / final[plan] / copy_per_s,
        "ratios": {name: final[key] / final[plan] for name, key in (("today", knob.today), ("liger", "liger")) if key in final},
        "timed": len(timed),
        "plans": len(plans),
        "next": [[knob.line(p), timed[p] * 1e6] for p in best[:8]],
        "wrong": [knob.line(p) for p in wrong],
        "left_out": sorted(set(bad.values())),
    }


def said(found: dict) -> str:
    ratios = "  ".join(f"{name} x{ratio:.3f}" for name, ratio in found["ratios"].items())
    wrong = f"  WRONG: {'; '.join(found['wrong'])}" if found["wrong"] else ""
    return (
        f"{found['case']:28} {found['us']:7.1f} us {found['percent_of_copy']:5.1f} % of copy  {ratios}  "
        f"{found['timed']} of {found['plans']} plans  {found['line']}{wrong}"
    )


def with_plan(case: Case, door: Door, plan: Any) -> Prepared:
    plain = getattr(door, case.way)(door.ours)

    def run(prepared: Any) -> Any:
        with case.knob.turned(plan), strict():
            return plain.run(prepared)

    return Prepared(plain.prepare, run)


def contest(works: dict[Any, measure.Work], case: Case, rounds: int) -> dict[Any, float]:
    """Median seconds of each, timed in turn."""
    if len(works) < 2:
        works = works | {"again": next(iter(works.values()))}
    gpu = not case.dry
    names = {str(i): key for i, key in enumerate(works)}
    found = measure.compare(
        {name: works[key] for name, key in names.items()},
        rounds=rounds, warmup=1, cold_l2=gpu, host_ahead=gpu, device=case.device,
    )  # fmt: skip
    return {names[name]: timing.median_s for name, timing in found.timings.items() if names[name] != "again"}


def agrees(case: Case, door: Door, work: measure.Work) -> bool:
    want = _tensors(getattr(door, case.way)(door.eager))
    return all(_error(a, b) <= TOLERANCE for a, b in zip(_tensors(work), want, strict=True))


if __name__ == "__main__":
    main()
