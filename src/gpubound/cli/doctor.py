"""Find what makes a script's GPU wait for its host: each line, its price, and what to write instead.

gpubound doctor train.py --epochs 3            runs the script unmodified until enough of its steps have been seen
gpubound doctor -m package.train               the same, of a module
gpubound doctor trace.json.gz                  reads a trace of torch.profiler
"""

import json
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from ..errors import DataError, GpuboundError
from ..trace import printable
from . import arguments


@dataclass(frozen=True)
class Doctor:
    """Find what makes a script's GPU wait for its host: each line, its price, and what to write instead.

    The script runs unmodified, with the arguments that follow its name. A step ends with Optimizer.step. After enough steps
    the script is stopped. The doctor's own options come before the script; after -- everything belongs to the script. Instead
    of a script, a trace of torch.profiler (.json, .json.gz) can be read.

    Examples: gpubound doctor train.py --epochs 3
              gpubound doctor --dry-run -m package.train
              gpubound doctor --dry-run --fix --max-syncs-per-step 0 train.py
    """

    dry_run: bool = False
    """Without a GPU, on a pretend device: counts and lines, but no prices, which need a GPU."""
    warmup: int = 10
    """Steps before anything is measured."""
    timed: int = 20
    """Steps that are timed, with nothing else attached."""
    taped: int = 10
    """Steps that are recorded by the profiler, without stacks."""
    step_marker: str = ""
    """What ends a step: MODULE:FUNCTION, or the name of an annotation (torch.profiler.record_function)."""
    keep_going: bool = False
    """Let the script run to its end."""
    out: Annotated[str | None, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")] = None
    """Where to write the page, doctor.json and SARIF. By default .doctor; with --json nowhere."""
    json: bool = False
    """Print the verdict as JSON. What the script prints then goes to stderr."""
    all: bool = False
    """List all that is harmless."""
    fix: bool = False
    """Show patches for the findings as one diff."""
    fix_also: str = ""
    """With --fix: patches that change the results or the output, too: tf32, bf16, rarely, unfiltered, persistent."""
    apply: bool = False
    """With --fix: write the patches into the files."""
    prove: Annotated[int | None, tyro.conf.arg(metavar="ROUNDS")] = None
    """With --fix: run the script unmodified and patched, this often each. Exit code 1 if the losses are not the same. With
    --dry-run the losses alone are compared."""
    max_syncs_per_step: float | None = None
    """Fail (exit 1) if a step waits for the device more often than this. Exit 3 if it could not be measured. All --max-* do."""
    max_idle_pct: float | None = None
    """Most per cent of a step in which the device does nothing."""
    max_host_late_ms: float | None = None
    """Most milliseconds of a step in which the device waits for its host."""
    max_pageable_mb: float | None = None
    """Most megabytes a step copies from or to pageable memory."""
    baseline: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """The doctor.json of a good run: a step must not be slower, nor have higher counts."""
    max_regress_pct: float | None = None
    """With --baseline: how much slower a step may be. By default 3 per cent."""
    allow: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A list (TOML) of what may stay."""

    @property
    def other_patches(self) -> tuple[str, ...]:
        """Return the names in --fix-also."""
        return tuple(filter(None, self.fix_also.split(",")))


def main(argv: Sequence[str]) -> int:
    command = split(argv)
    target, rest, module = command.target, command.rest, command.module
    options = arguments(Doctor, command.own, "doctor")
    check_command(options, command)
    from ..distributed.rendezvous import rank_and_world
    from ..doctor.record.run import RunPlan, measure_script, measure_trace
    from ..doctor.record.script import Script, end_anyway
    from ..doctor.report import check_reports, screen, write_reports
    from ..doctor.report.words import merge_ranks, send_error  # torch takes two seconds: options are read first
    from ..doctor.rules.diagnose import diagnose
    from .doctor_actions import check_fix, finish_fix, patch, progress, read_gate

    check_fix(options)
    folder = Path(options.out or ".doctor") if options.out is not None or not options.json else None
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"out: {folder} is a file; give a folder with --out.")
    if folder is not None:
        check_reports(folder)
    rank, _ = rank_and_world()
    threads = threading.enumerate()
    gate = read_gate(options)
    with prints_to_stderr() if options.json else nullcontext():
        try:
            if is_trace(command):
                evidence = measure_trace(Path(target), options.step_marker)
            else:
                plan = RunPlan(
                    warmup=options.warmup, timed=options.timed, taped=options.taped, marker=options.step_marker,
                    keep_going=options.keep_going, dry=options.dry_run,
                )  # fmt: skip
                evidence = measure_script(Script(target, tuple(rest), module), plan, progress() if rank == 0 else None)
        except (ValueError, GpuboundError) as error:
            send_error(error)
            raise
    verdict = merge_ranks(diagnose(evidence))
    if rank != 0:
        return 0
    verdict = replace(verdict, command=command_line(argv), date=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}")
    result = patch(options, command, verdict)
    verdict = result.verdict
    files, write_error = [], None
    try:
        if folder is not None:
            files = [str(path) for path in write_reports(folder, verdict, evidence, result.proof, result.diff)]
    except OSError as error:  # raised after the verdict, which took a run
        write_error = DataError(f"out: the reports could not be written to {folder}: {error}; give another --out.")
    if options.json:
        print(json.dumps(verdict.as_dict(), indent=1))
    else:  # a coloured screen has its escapes; the report has cleaned its quotations
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")  # no-color.org
        width, colour = shutil.get_terminal_size().columns, sys.stdout.isatty() and not plain
        text = screen(verdict, width, colour, options.all, files)
        print("" if is_trace(command) else "\n", text if colour else printable(text), sep="", end="")  # after a progress bar
    gate_lines, gate_code = gate(verdict)  # before a patch is written: allowances are matched with the files
    fix_lines, fix_code = finish_fix(options, result)
    for text in [*fix_lines, *gate_lines]:
        print(text, file=sys.stderr if options.json else sys.stdout)
    code = 1 if 1 in (gate_code, fix_code) else max(gate_code, fix_code)
    if not options.keep_going and "steps" not in evidence.absent:
        end_anyway(code if write_error is None else 2, threads)
    if write_error is not None:
        raise write_error
    return code


def check_command(options: Doctor, command: "Command") -> None:
    """Raise ValueError for a command line without a script or trace, or with misplaced options."""
    target, rest = command.target, command.rest
    if not target:
        raise ValueError("script: got none; give a script, -m and a module, or a trace, as in gpubound doctor train.py.")
    if rest and is_trace(command):
        raise ValueError(f"trace: got {rest[0]!r} after {target}; a trace takes no arguments.")
    if not command.module and not Path(target).exists():
        raise ValueError(f"script: there is no file {target}; give a script, -m and a module, or a trace (.json, .json.gz).")
    refuse_misplaced(command)


SECRET = re.compile(r"-{1,2}\S*(token|secret|password|api[-_]?key)$", re.IGNORECASE)


def command_line(argv: Sequence[str]) -> str:
    """Return the command line for a report, without secrets, and without folders outside of this one."""
    words, option = ["gpubound", "doctor"], ""
    for word in argv:
        name, equals, value = word.rpartition("=")
        if SECRET.match(name if equals else option):
            value = "..."
        elif os.path.isabs(value):
            path = os.path.relpath(value)
            value = os.path.basename(value) if path.startswith(os.pardir) else path
        words.append(f"{name}{equals}{value}")
        option = word
    return shlex.join(words)


def is_trace(command: "Command") -> bool:
    return not command.module and command.target.endswith((".json", ".json.gz"))


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, also of programs and libraries, which know a stream by its number."""
    sys.stdout.flush()
    with ExitStack() as ending, redirect_stdout(sys.stderr):
        with suppress(OSError):  # a caller may have closed either
            stdout = os.dup(1)
            ending.callback(os.close, stdout)
            os.dup2(2, 1)
            ending.callback(os.dup2, stdout, 1)
        yield


class Command(NamedTuple):
    """The command line, split at the script."""

    own: list[str]  # the doctor's arguments
    target: str  # the script or module
    rest: list[str]  # its arguments
    module: bool
    separated: bool = False  # by --, so that everything after it belongs to the script


def split(argv: Sequence[str]) -> Command:
    """Split the command line at the script, at -m, or at -- (which may be followed by -m)."""
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(Doctor) if field.type is bool} | {"-h", "--help"}
    at = 0
    while at < len(argv):
        word = argv[at]
        if word in ("-m", "--"):
            separated = word == "--"
            module = word == "-m" or argv[at + 1 : at + 2] == ["-m"]
            target = at + 1 + (separated and module)
            return Command(list(argv[:at]), "".join(argv[target : target + 1]), list(argv[target + 1 :]), module, separated)
        if not word.startswith("-"):
            return Command(list(argv[:at]), word, list(argv[at + 1 :]), False)
        at += 1 if word in flags or word.replace("_", "-") in flags or "=" in word else 2
    return Command(list(argv), "", [], False)


# Options that many scripts have, too, and whose loss is noticed at once: they may follow a script.
SHARED = {"--warmup", "--out", "--json", "--all", "--device"}


def refuse_misplaced(command: Command) -> None:
    """Raise ValueError for an option of the doctor after a script that does not name it: a budget would not be checked."""
    if command.separated:
        return
    own = {f"--{field.name.replace('_', '-')}" for field in fields(Doctor)} - SHARED
    source = source_of(command)
    for word in command.rest:
        option = word.partition("=")[0].replace("_", "-")
        if option in own and not re.search(rf"\b{option[2:].replace('-', '[-_]')}\b", source):
            script = f"-m {command.target}" if command.module else command.target
            raise ValueError(
                f"{option}: got it after {script}, which does not name it; put {option} before the script, or write "
                f"gpubound doctor -- {script} ... if it is the script's own."
            )


def source_of(command: Command) -> str:
    """Return the text of the script, or of a module below this folder; empty for any other module."""
    path = Path(command.target.replace(".", os.sep)) if command.module else Path(command.target)
    for file in (path, path / "__main__.py", Path(f"{path}.py")):
        if file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")
    return ""
