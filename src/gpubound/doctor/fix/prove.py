"""Proof of a patch: the script runs unmodified and patched, with the same seed, and its step times and losses are compared.

The runs alternate in random order, each in a new process, or in one for each rank. The speed-up is the median of the rounds'
ratios with its 95 % interval; of several ranks the slowest counts. The losses of all ranks are compared bit for bit if the
patch only schedules, else within a tolerance. The user's files are not written: the patched process imports the new text.

Two runs of one script may differ: cuDNN's benchmark chooses algorithms by their times, and kernels add in any order. A patch
that draws other numbers would hide among such differences, and a right one would fail by chance. So the losses of such a script
are those of further runs under torch.use_deterministic_algorithms, which are not timed.

    python -m gpubound.doctor.fix.prove JOB.json

makes one run. The job names the script, its arguments, patched files, a seed, a number of steps and the file for the result. A
loss is the tensor that backward is called on, or the result of a gb.TrainStep. It stays on the device until the end, so that
the run waits no more than the script does.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.machinery import SourceFileLoader
from itertools import combinations, islice, takewhile
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from ...distributed.rendezvous import rank_and_world, wait_for_ranks
from ...errors import MeasureError
from ...formatting import in_words
from ...measure.timing import Ratio, compare_samples
from ...trace import hooked
from ...watch.pretend_cuda import cuda_is_pretended
from ..finding import Verdict
from ..record.script import Script, Steps, TrainSteps

LOSSES, COMPARED = 100_000, 60  # losses that are recorded at most, and steps that have them: rounding grows with each step
RUN = ("gpubound.doctor.fix.prove",)  # the module that makes a run, and arguments before the job's file


@dataclass
class SeededJob:
    """A run of a script. `patched` maps files to the files with their new text. `module`: the script is a module's name."""

    script: str
    arguments: list[str]
    patched: dict[str, str]
    result: str
    seed: int = 0
    steps: int = 0
    """End the run after this many steps; 0: let the script end by itself."""
    warmup: int = 0
    """The first of them, which are not timed."""
    module: bool = False
    marker: str = ""
    """What ends a step, if not an optimizer."""
    dry: bool = False
    """On the pretend device."""
    deterministic: bool = False
    """Every kernel adds in a fixed order, where torch has one that does."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def result_of(self, rank: int) -> Path:
        """Return the result file of a rank."""
        return Path(f"{self.result}.{rank}" if rank else self.result)


class Recorder:
    """Records the ends of the steps and the losses of a run; where nothing is trained, sums of the model's outputs."""

    def __init__(self, steps: int, enough: Callable[[], Any]):
        self.steps, self.enough, self.inside, self.trains = steps, enough, 0, False
        self.ends: list[Any] = []
        self.losses: list[torch.Tensor] = []
        self.train_steps = TrainSteps(lambda _, result: self.lost(result.loss))
        self._hooks = ExitStack()  # of all modules, until it trains: 4 µs a call, of which cleanrl's PPO makes 108 a step

    def stepped(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            end: Any = torch.cuda.Event(enable_timing=True)
            end.record()
        else:
            end = perf_counter()
        self.ends.append(end)
        if len(self.ends) == self.steps:
            self.enough()

    def backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.trains:
            self.trains, self.losses[:] = True, []
            self._hooks.close()
        for loss in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors):
            if not self.train_steps.inside:
                self.lost(loss)
        return original(tensors, *args, **kwargs)

    def lost(self, loss: torch.Tensor) -> None:
        if loss.numel() == 1 and len(self.losses) < LOSSES and len(self.ends) < COMPARED:
            self.losses.append(loss.detach().clone())

    def entered(self, *_: Any) -> None:
        self.inside += 1

    def left(self, module: Any, inputs: Any, output: Any) -> None:
        self.inside = max(self.inside - 1, 0)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if not (self.inside or self.trains or torch.is_grad_enabled()) and tensors and any(True for _ in module.parameters()):
            self.lost(tensors[0].sum(dtype=torch.float64))

    @contextmanager
    def listening(self, marker: str = "") -> Iterator[None]:
        """Listen to losses, then to steps: a loss is recorded before its step's end, which may end the run."""
        losses = hooked(torch.autograd, "backward", self.backward)
        for hook in (
            register_module_forward_pre_hook(self.entered),
            register_module_forward_hook(self.left, always_call=True),
        ):
            self._hooks.callback(hook.remove)
        with self._hooks, self.train_steps.listening(), losses, Steps(self.stepped, marker):
            yield

    def as_dict(self) -> dict[str, Any]:
        """Return milliseconds between the ends of steps, and the losses as exact numbers (for `float.fromhex`)."""
        if self.ends and not isinstance(self.ends[0], float):
            self.ends[-1].synchronize()  # on the pretend device, too, which a run that ended by itself has left
            between = [a.elapsed_time(b) for a, b in zip(self.ends, self.ends[1:])]
        else:
            between = [(b - a) * 1e3 for a, b in zip(self.ends, self.ends[1:])]
        return {"step_ms": between, "losses": [float(loss).hex() for loss in self.losses]}


@contextmanager
def reading_instead(patched: Mapping[str, bytes]) -> Iterator[None]:
    """Run and import from `patched` bytes instead of the files. No cached bytecode of such a file is read or written."""
    files = {os.path.realpath(name): data for name, data in patched.items()}
    get_data, path_stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def data_of(loader: SourceFileLoader, path: str) -> bytes:
        return files[real] if (real := os.path.realpath(path)) in files else get_data(loader, path)

    def stats_of(loader: SourceFileLoader, path: str) -> Mapping[str, Any]:
        if os.path.realpath(path) in files:
            raise OSError(f"{path}: is read from elsewhere")  # the import system then compiles what get_data returns
        return path_stats(loader, path)

    def opened(open_code: Callable[[str], IO[bytes]], path: str) -> IO[bytes]:
        """Replace io.open_code, which reads a script; a loader reads modules."""
        return io.BytesIO(files[real]) if (real := os.path.realpath(path)) in files else open_code(path)

    SourceFileLoader.get_data, SourceFileLoader.path_stats = data_of, stats_of  # type: ignore[method-assign, assignment]
    try:
        with hooked(io, "open_code", opened):
            yield
    finally:
        SourceFileLoader.get_data, SourceFileLoader.path_stats = get_data, path_stats  # type: ignore[method-assign]


def run(job: SeededJob, recorder: Recorder) -> None:
    """Run the job's script in this process."""
    random.seed(job.seed)
    np.random.seed(job.seed)
    torch.manual_seed(job.seed)
    patched = {name: Path(copy).read_bytes() for name, copy in job.patched.items()}
    dry = cuda_is_pretended() if job.dry else nullcontext()
    same = deterministic() if job.deterministic else nullcontext()
    with dry, same, reading_instead(patched), recorder.listening(job.marker):
        Script(job.script, tuple(job.arguments), job.module).run()


@contextmanager
def deterministic() -> Iterator[None]:
    """Choose deterministic kernels, also in a script that sets cudnn.benchmark. An op without one warns."""

    def unbenchmarked(*_: object) -> None:
        torch.backends.cudnn.benchmark = False

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    handle = register_module_forward_pre_hook(unbenchmarked)
    try:
        yield
    finally:
        handle.remove()
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def main(argv: list[str]) -> int:
    job = SeededJob(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))

    leave = os._exit  # Script replaces os._exit

    def save() -> None:
        job.result_of(rank_and_world()[0]).write_text(json.dumps(recorder.as_dict()), encoding="utf-8")

    def enough() -> None:
        save()
        wait_for_ranks()
        for worker in multiprocessing.active_children():  # a loader's: they would go on during the next run
            worker.kill()
        sys.stdout.flush()
        leave(0)  # at once: the script writes no checkpoint, and none of its handlers runs

    recorder = Recorder(job.steps, enough)
    try:
        run(job, recorder)
    except ValueError as failed:  # the script's traceback has been printed
        print(failed, file=sys.stderr)
        return 1
    save()
    return 0


WARMUP = 10  # steps: the first ones allocate, autotune and compile
STEPS = 60
ROUNDS = 5
DRY = "a dry run has no GPU; the losses are compared"
LAUNCHED = re.compile("(LOCAL_)?(RANK|WORLD_SIZE)|(GROUP|ROLE)_.*|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")  # what torchrun sets
TOLERANCE = 1e-2  # of a loss: a few dozen steps apart, products rounded to 10 bits differ by about a thousandth


@dataclass(frozen=True)
class SeededRun:
    """Result of a run: the milliseconds of its steps after the warm-up, and its losses."""

    step_ms: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Proof:
    """Measurements of a patch. On the pretend device nothing is timed: no milliseconds, no speed-up."""

    before_ms: tuple[float, ...]
    after_ms: tuple[float, ...]
    speedup: Ratio | None
    losses: int
    difference: float
    """The largest difference between a loss before and after, relative to the loss. Infinite where their numbers differ."""
    noise: float
    """The same between runs of the script as it was. Above 0 the script is not deterministic, and bits prove nothing."""
    tolerance: float
    """The most that is allowed: 0 where the patch must not change a bit."""
    scattered: float = 0.0
    """If the losses are those of deterministic runs: the noise of the timed ones."""

    @property
    def faster(self) -> bool:
        """Return whether the whole interval is above 1."""
        return self.speedup is not None and self.speedup.low > 1

    @property
    def holds(self) -> bool:
        """Return whether the losses are the same, as far as the script itself repeats them."""
        return self.difference <= max(self.tolerance, self.noise)

    @property
    def sentence(self) -> str:
        """A sentence about the losses."""
        if self.scattered:
            alone = replace(self, scattered=0.0).sentence
            return (
                f"under deterministic algorithms {alone} (without them two runs of the script differ by {self.scattered:.1e})"
            )
        if self.difference == self.noise == 0:
            return f"{self.losses} losses are equal bit for bit"
        if self.difference == float("inf"):
            return "the losses are not the same in number, or not finite in the same places"
        if self.noise > self.tolerance and self.noise >= self.difference:
            text = f"{self.losses} losses differ by {self.difference:.1e} in the middle one of the runs"
            return f"{text}, no more than two runs of the script as it was ({self.noise:.1e})"
        return f"{self.losses} losses differ by at most {self.difference:.1e} (allowed: {max(self.tolerance, self.noise):.1e})"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"faster": self.faster, "holds": self.holds}

    def __str__(self) -> str:
        losses = f"{'the same' if self.holds else 'NOT the same'}: {self.sentence}"
        if self.speedup is None:
            return f"not timed: {DRY}\n{losses}"
        before, after = statistics.median(self.before_ms), statistics.median(self.after_ms)
        verdict = "faster" if self.faster else "slower" if self.speedup.high < 1 else "no difference that is sure"
        return (
            f"before {before:.2f} ms, after {after:.2f} ms a step: {self.speedup}, {verdict} "
            f"({len(self.before_ms)} alternating rounds)\n{losses}"
        )


def prove(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    changes: Mapping[Path, bytes],
    equal: bool,
    rounds: int = ROUNDS,
    warmup: int = WARMUP,
    steps: int = STEPS,
    seed: int = 0,
    module: bool = False,
    marker: str = "",
    dry: bool = False,
    ranks: int = 0,
    at_once: int = 1,
    report: Callable[[str], None] = lambda line: None,
) -> Proof:
    """Run `script` unmodified and with `changes` (a file's new bytes), `rounds` times each.

    equal    no bit of a loss may change
    warmup   the number of steps that are not timed
    steps    the number of steps after which a run ends
    seed     of the generators of Python, NumPy and torch
    module   `script` is a module's name, as after `python -m`
    marker   what ends a step, if not an optimizer
    dry      run on the pretend device, and compare the losses only
    ranks    the number of processes on this machine, for a script that torchrun starts. 0: it is started by python
    at_once  the number of runs that are started together, where they take turns in what is timed
    report   receives a line of progress for each run
    """
    if rounds < 3:
        raise ValueError(f"prove: rounds: got {rounds}, wanted at least 3: an interval needs them.")
    if steps <= warmup + 1:
        raise ValueError(f"prove: steps: got {steps}, wanted more than {warmup + 1}: the first {warmup} are the warm-up.")
    if not changes:
        raise ValueError("prove: there is no change to prove; no patch was taken.")
    runs: dict[str, list[SeededRun]] = {"after": [], "before": []}
    shuffle = random.Random(seed).shuffle
    with tempfile.TemporaryDirectory(prefix="gpubound-prove-") as folder, ExitStack() as ending:
        pool = ThreadPoolExecutor(at_once)
        ending.callback(pool.shutdown, cancel_futures=True)
        patched = {}
        for number, (file, data) in enumerate(changes.items()):
            copy = Path(folder) / f"{number}.py"
            copy.write_bytes(data)
            patched[str(file.resolve())] = str(copy)
        plain = SeededJob(str(script), list(arguments), {}, "", seed, steps, warmup, module, marker, dry)
        jobs = {"before": plain, "after": replace(plain, patched=patched)}

        def begin(side: str, **options: Any) -> Future[SeededRun]:
            own = Path(tempfile.mkdtemp(dir=folder))
            job = replace(jobs[side], result=str(own / "result.json"), **options)
            return pool.submit(run_once, job, side, own, ranks)

        order: list[str] = []
        for _ in range(rounds):
            shuffle(pair := list(runs))
            order += pair
        begun = ((side, begin(side)) for side in order)
        running = deque(islice(begun, at_once))
        while running:
            side, first = running.popleft()
            runs[side].append(first.result())
            running.extend(islice(begun, 1))
            number = sum(map(len, runs.values()))
            took = "" if dry else f": {in_words(runs[side][-1].step_ms / 1e3)} a step"
            report(f"--prove: run {number}/{2 * rounds}, {side}{took}")
        proof = compare_runs(runs["before"], runs["after"], 0.0 if equal else TOLERANCE, timed=not dry)
        if proof.noise <= proof.tolerance or dry:
            return proof
        report(f"--prove: two runs of the script differ by {proof.noise:.1e}; once more, with deterministic algorithms")
        fixed = {"steps": max(min(steps, COMPARED), 3), "warmup": 0, "deterministic": True}
        same = {side: running.result() for side, running in [(side, begin(side, **fixed)) for side in jobs]}
        apart = difference(same["before"].losses, same["after"].losses)
        if apart > proof.tolerance:  # the patch, or a script that differs even so
            again = begin("before", **fixed).result()
            if difference(same["before"].losses, again.losses) > proof.tolerance:
                return proof
    return replace(proof, losses=len(same["before"].losses), difference=apart, noise=0.0, scattered=proof.noise)


def timed_windows(verdict: Verdict) -> list[range]:
    """Return the numbers of the steps, from 1, that the doctor timed, a window for each phase that timed some.

    The first epoch chooses algorithms for its smaller last batch, too, and an agent that acts less at random calls its model
    more often: only the same steps can be compared with a verdict.
    """
    windows, end = [], 0
    for name, phase in verdict.phases.items():
        end += int(phase["steps"])
        if name == "timed" or (name == "plain" and verdict.plain_ms is not None):
            timed = (int(phase["steps"]) - int(phase.get("drained", 0))) // verdict.period * verdict.period
            windows += [range(end - timed + 1, end + 1)] if timed else []
    return windows


def timed_steps(verdict: Verdict) -> dict[str, int]:
    """Return the warm-up and the steps of a run that times the steps that the doctor timed, with those between; nothing if it
    timed none. The first time is the second step's."""
    windows = timed_windows(verdict)
    return {"warmup": windows[0].start - 2, "steps": windows[-1].stop - 1} if windows and windows[0].start > 1 else {}


def run_once(job: SeededJob, side: str, folder: Path, ranks: int = 0) -> SeededRun:
    """Run once in a new process, or in ranks with a new rendezvous."""
    job.save(folder / "job.json")
    results = [job.result_of(rank) for rank in range(max(ranks, 1))]
    for result in results:
        result.unlink(missing_ok=True)
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks else []
    command = [sys.executable, "-m", *start, *RUN, str(folder / "job.json")]
    environment = _environment() | ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if job.deterministic else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not all(result.exists() for result in results):
        print(done.stderr, file=sys.stderr)
        message = " / ".join(error_lines(done.stderr)).rstrip(".") or "it said nothing"
        what = "with the patch" if side == "after" else "unmodified"
        raise MeasureError(f"prove: the script {what} ended with code {done.returncode}: {message}.")
    runs = [read_run(json.loads(result.read_text(encoding="utf-8")), 0 if job.dry else job.warmup) for result in results]
    return SeededRun(max(run.step_ms for run in runs), tuple(loss for run in runs for loss in run.losses))


ERROR = re.compile(r"\s*(what\(\):|terminate called|CUDA error|[\w.]+(Error|Exception|Interrupt)\b)")


def error_lines(stderr: str) -> list[str]:
    """Return the last line of a script's stderr that names an error, and the line after it; or if none does, the last two.

    An aborted program ends with frames of C++, and ranks end with lines of their launcher: both are left out.
    """
    lines = takewhile(lambda line: "torch/distributed/" not in line and "elastic" not in line, stderr.splitlines())
    own = [line.strip() for line in lines if line.strip() and not line.startswith("frame #")]
    last = max((number for number, line in enumerate(own) if ERROR.match(line)), default=max(len(own) - 2, 0))
    return own[last : last + 2]


def _environment() -> dict[str, str]:
    """Return the environment without the variables of a launcher: the new ranks must not use the rendezvous of this process."""
    home = str(Path(__file__).parents[3])  # from which this gpubound is imported
    paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    environment = {name: value for name, value in os.environ.items() if not LAUNCHED.fullmatch(name)}
    return environment | {"PYTHONHASHSEED": "0", "PYTHONPATH": paths}


def read_run(content: Mapping[str, Any], warmup: int) -> SeededRun:
    times = content["step_ms"][warmup:]
    if not times:
        raise MeasureError(
            f"prove: {len(content['step_ms']) + 1 if content['step_ms'] else 'no'} steps were seen, "
            f"wanted more than {warmup + 1}; let the script make more."
        )
    return SeededRun(sum(times) / len(times), tuple(float.fromhex(text) for text in content["losses"]))


def compare_runs(before: Sequence[SeededRun], after: Sequence[SeededRun], tolerance: float, timed: bool = True) -> Proof:
    """Return the proof from these runs."""
    old, new = ([run.step_ms for run in side if timed] for side in (before, after))
    ratio = compare_samples({"after": new, "before": old}).ratios["before"] if timed else None
    first = before[0].losses
    if not first:
        raise MeasureError("prove: backward was called on no single value, so there are no losses to compare.")
    noise = max((difference(one.losses, other.losses) for one, other in combinations(before, 2)), default=0.0)
    # From the nearest of the runs before. The largest of all would exceed `noise`, which is of fewer pairs, by chance alone.
    apart = sorted(min(difference(run.losses, other.losses) for run in before) for other in after)
    worst = apart[len(apart) // 2] if noise > tolerance and apart[-1] < float("inf") else apart[-1]
    return Proof(tuple(old), tuple(new), ratio, len(first), worst, noise, tolerance)


def difference(wanted: Sequence[float], got: Sequence[float]) -> float:
    """Return the largest relative difference; infinite if the lengths differ, or if only one value is NaN or infinite."""
    if len(wanted) != len(got):
        return float("inf")
    return max((_apart(w, g) for w, g in zip(wanted, got)), default=0.0)


def _apart(wanted: float, got: float) -> float:
    if wanted == got or (wanted != wanted and got != got):
        return 0.0
    apart = abs(wanted - got) / max(abs(wanted), abs(got))
    return apart if apart == apart else float("inf")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
