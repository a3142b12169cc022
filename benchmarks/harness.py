"""What every benchmark does with a case: check that ours and each peer compute the same, time them in turn, keep a line a peer.

A case whose results disagree is never timed: a speed on a red gate means nothing.
"""

import gc
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gpubound
from gpubound import measure
from gpubound.errors import MeasureError
from gpubound.measure import Comparison, Prepared
from gpubound.trace import strict
from gpubound.watch import watch

from . import results
from .gates import beside, figure, sentence

SCALE = {"GB/s": 1e9, "TFLOP/s": 1e12, "tok/s": 1.0, "pairs/s": 1.0, "us": 1e-6, "ms": 1e-3}
# bf16 against bf16, each rounded at its own places: two units in the last place (2^-8) of relative error over the whole tensor.
TOLERANCE = 1e-2
# How works are timed on a GPU, as options of measure.compare.
KERNELS = {"cold_l2": True, "host_ahead": True}
CAPTURED = {"graph": True}  # without launches
WAITED_FOR: dict[str, bool] = {}  # by a user, launches included


class Asked(NamedTuple):
    """What is asked for, as a peer called "budget": its seconds, and what a case is held to beside it."""

    seconds: dict[str, list[float]]
    gates: dict[str, float]
    moonshots: dict[str, float]


def asked(goal: tuple[float, float | None] | None, amount: float, rounds: int) -> Asked:
    """Of a goal in units a second, (gate, moonshot), for a case of `amount` units. None: nothing is asked for."""
    if goal is None:
        return Asked({}, {}, {})
    gate, moonshot = goal
    return Asked({"budget": [amount / gate] * rounds}, {"budget": 1.0}, {"budget": moonshot / gate} if moonshot else {})


class Bench:
    """One run of one benchmark: its cases, its findings, its exit code.

    dry: tiny sizes on any machine, three rounds, nothing kept. Otherwise lines go to `folder`/<gpu>.jsonl as they are measured,
    so that a run which is cut short keeps what it had.
    """

    def __init__(self, name: str, device: torch.device, command: str, *, dry: bool = False, folder: Path = results.FOLDER):
        self.name, self.device, self.dry, self.folder = name, device, dry, folder
        self.rounds = 3 if dry else 20
        self.origin = results.provenance(device, command)
        self.lines: list[results.Line] = []
        self.wrong: list[str] = []
        self.unmeasured: list[str] = []
        self._measured_again = False

    @classmethod
    def of(cls, options: Any, name: str, device: torch.device, argv: Sequence[str]) -> "Bench":
        """The benchmark that was asked for by `gpubound bench NAME ARGV`."""
        return cls(name, device, " ".join([f"gpubound bench {name}", *argv]), dry=options.dry, folder=options.results)

    def case(
        self,
        case: str,
        works: Mapping[str, measure.Work],
        *,
        unit: str,
        amount: float,
        ceiling: tuple[str, float] | None = None,
        gates: Mapping[str, float] | None = None,
        moonshots: Mapping[str, float] | None = None,
        tolerance: float = TOLERANCE,
        floor: measure.Work | None = None,
        clock: Mapping[str, bool] = KERNELS,
    ) -> Comparison | None:
        """Check and time `works`; the first is ours. Each returns its tensors (outputs, or gradients) in the same order.

        `amount` is what one call moves (bytes), computes (operations) or handles (tokens); `ceiling` is (name, the same a
        second), and stands as a peer. `gates` and `moonshots` are the wanted ratios by peer name. `floor` is the part of the
        work that nobody can leave out: a peer by the name of results.FLOOR, which computes less and is not compared.
        """
        ours, *peers = list(works)
        with strict():  # the reference behind a door that fell back would be measured as ours
            agreed = self._agreeing(case, works, tolerance)
        for peer in peers:
            if peer not in agreed and peer in (gates or {}):
                self.unmeasured.append(f"{case}: {peer} has a gate and was not timed")
        timed = {name: works[name] for name in agreed} | ({} if floor is None else {results.FLOOR: floor})
        if ours not in agreed or len(timed) < 2:
            return None
        with strict():
            found = measure.compare(
                timed,
                rounds=self.rounds,
                warmup=1 if self.dry else 3,
                device=self.device,
                **(clock if self.device.type == "cuda" else {}),
            )
        self.keep(case, found, unit=unit, amount=amount, ceiling=ceiling, gates=gates, moonshots=moonshots)
        return found

    def keep(
        self,
        case: str,
        found: Comparison,
        *,
        unit: str,
        amount: float,
        ceiling: tuple[str, float] | None = None,
        gates: Mapping[str, float] | None = None,
        moonshots: Mapping[str, float] | None = None,
    ) -> None:
        """A line for each peer of a comparison that was measured already, and one for the ceiling."""
        value = {name: _in_unit(unit, amount, timing.median_s) for name, timing in found.timings.items()}
        ours, percent = value[found.ours], None
        rows = [(n, value[n], r.value, r.spread) for n, r in found.ratios.items()]
        if ceiling is not None:
            name, per_s = ceiling
            share = amount / found.timings[found.ours].median_s / per_s
            percent = 100 * share
            if share > 1:
                self._doubt(case, name)
            rows.append((name, _in_unit(unit, amount, amount / per_s), share, found.timings[found.ours].spread))
        for peer, peer_value, ratio, spread in rows:
            self._line(case, unit, ours, peer, peer_value, ratio, spread, percent, gates, moonshots)
        self._say(case)

    def figure(self, case: str, unit: str, ours: float, peers: Mapping[str, float], gates: Mapping[str, float]) -> None:
        """A figure that is not a time: GiB at the peak, host syncs in a call."""
        for peer, value in peers.items():
            self._line(case, unit, ours, peer, value, results.ratio(unit, ours, value), None, None, gates, None)
        self._say(case)

    def _doubt(self, case: str, ceiling: str) -> None:
        """A ceiling that is passed was measured on a busy machine: once a run it is measured again, for the runs to come."""
        print(f"{case}: passes {ceiling}, which was measured too low, or does not bind this work", flush=True)
        if not self.dry and not self._measured_again:
            self._measured_again = True
            measure.ceilings(self.device, refresh=True)

    def _line(self, case, unit, ours, peer, peer_value, ratio, spread, percent, gates, moonshots) -> None:
        line = results.Line(
            bench=self.name,
            case=case,
            ours=_short(ours),
            peer=_short(peer_value),
            peer_name=peer,
            unit=unit,
            ratio=_short(ratio),
            gate=(gates or {}).get(peer),
            moonshot=(moonshots or {}).get(peer),
            spread=None if spread is None else _short(spread),
            percent_of_ceiling=None if percent is None else round(percent, 1),
            **self.origin,
        )
        self.lines.append(line)
        if not self.dry:
            results.append([line], self.folder)

    def _say(self, case: str) -> None:
        mine = [line for line in self.lines if line.case == case]
        newest = [line for line in mine if line.unit == mine[-1].unit]
        peers = "  ".join(beside(line) for line in newest)
        print(f"{case:44} {figure(newest[0].ours, newest[0].unit):>14}  {peers}", flush=True)

    def _agreeing(self, case: str, works: Mapping[str, measure.Work], tolerance: float) -> list[str]:
        """The names that ran and agree with ours; ours first. Whatever does not is reported, and ends the run red."""
        ours, *peers = list(works)
        try:
            want = _tensors(works[ours])
        except Exception as error:  # a kernel can raise anything; the run goes on to the next case and ends red
            self.wrong.append(f"{case}: ours raised {_sentence(error)}")
            return []
        agreed = [ours]
        for peer in peers:
            try:
                got = _tensors(works[peer])
            except Exception as error:
                self.unmeasured.append(f"{case}: {peer} raised {_sentence(error)}")
                continue
            worst = max((_error(g, w) for g, w in zip(got, want, strict=True)), default=0.0)
            if worst <= tolerance:
                agreed.append(peer)
            else:
                self.wrong.append(f"{case}: ours and {peer} differ by {worst:.1e} (limit {tolerance:.0e}); not timed")
        return agreed

    def finish(self) -> int:
        """Say what went wrong and what falls short, last, and return the exit code."""
        short = [line for line in self.lines if line.short and not self.dry]
        for what in self.wrong:
            print(f"WRONG       {what}", file=sys.stderr)
        for what in self.unmeasured:
            print(f"UNMEASURED  {what}", file=sys.stderr)
        for line in short:
            print(sentence(line), file=sys.stderr)
        kept = "nothing kept (dry)" if self.dry else f"kept in {results.file_of(self.origin['gpu'], self.folder)}"
        gated = sum(line.gate is not None for line in self.lines)
        print(f"{self.name}: {len(self.lines)} lines, {kept}; {gated - len(short)} of {gated} gates hold")
        return 1 if self.wrong or short else 3 if self.unmeasured or not self.lines else 0


def release(device: torch.device) -> None:
    """Give the memory of the last case back before the next one is built, and what torch.compile remembers of it."""
    if "torch._dynamo" in sys.modules:  # else its limit of eight recompilations would turn later cases into eager
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_gib(work: measure.Work, device: torch.device) -> float:
    """The most memory that a call holds beyond what was held before it."""
    if device.type != "cuda":
        raise MeasureError(f"peak memory is read from the CUDA allocator, and this runs on {device}.")
    prepared = (work.prepare(),) if isinstance(work, Prepared) else ()
    run = work.run if isinstance(work, Prepared) else work
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(*prepared)
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def host_syncs(run: Callable[[], Any]) -> int:
    """How often the host waits for the device inside `run`, by the ledger."""
    with watch() as ledger:
        run()
    if "syncs" not in ledger.totals:
        raise MeasureError(f"host syncs cannot be counted here: {ledger.absent}.")
    if ledger.totals["syncs"]:
        print(ledger, file=sys.stderr)  # which lines wait
    return int(ledger.totals["syncs"])


def chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The words of a comma-separated option; all that are known when it is empty."""
    wanted = [word.strip() for word in text.split(",") if word.strip()] or list(known)
    if unknown := [word for word in wanted if word not in known]:
        raise ValueError(f"{option}: got {unknown[0]!r}, wanted some of {', '.join(known)}.")
    return wanted


@cache
def compile_sources(folder: Path = Path(gpubound.__file__).parent) -> None:
    """Write the bytecode of all modules beside them, as pip does when it installs a package.

    Without it, as under PYTHONDONTWRITEBYTECODE, each fresh process compiles what it imports: 0.5 s of a first token.
    """
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", str(folder)], stdout=subprocess.DEVNULL)


def importable(package: str) -> bool:
    try:
        __import__(package)
    except ImportError:
        return False
    return True


def need_transformers(command: str) -> None:
    if not importable("transformers"):
        raise MeasureError(f"{command} needs transformers: pip install 'gpubound[hf]'.")


def _tensors(work: measure.Work) -> list[Tensor]:
    """What one call computes, copied: some peers write over their inputs, and the next call would change what we hold."""
    found = measure.run_once(work)
    return [t.detach().clone() for t in (found if isinstance(found, tuple | list) else (found,))]


def _error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖; infinite when either holds a NaN or the shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    wide = torch.promote_types(want.dtype, torch.float32)
    error = (torch.linalg.vector_norm((got - want).to(wide)) / torch.linalg.vector_norm(want.to(wide)).clamp_min(1e-12)).item()
    return error if error == error else float("inf")


def _in_unit(unit: str, amount: float, seconds: float) -> float:
    return seconds / SCALE[unit] if unit in results.LESS_IS_BETTER else amount / seconds / SCALE[unit]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
