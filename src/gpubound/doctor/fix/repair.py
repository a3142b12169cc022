"""Patches for findings: chosen, combined into a diff, and written on request.

Some findings are settings of libraries that copy batches or check a loss themselves: accelerate, Hugging Face's Trainer,
Lightning.

accelerator = Accelerator()        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
trainer = Trainer(args=args)       args.accelerator_config.non_blocking = True
                                   trainer = Trainer(args=args)

accelerate and Lightning do not pin the memory of a DataLoader that the script makes; Trainer makes and pins its loader.
"""

import difflib
import io
import os
import re
import stat
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import DataError
from ...files import reading, replacing
from ...formatting import hint
from ...watch.events import shorten
from ..finding import Finding, Verdict
from ..rules.remedies import ACTED
from .calls import BF16, FOREACH, LATER, OPTIMIZER, RARELY, READ_LATER, TF32, UNVALIDATED, WAITS, ZERO_GRAD
from .copies import (
    COPIES,
    FILLED,
    GATHERED,
    INDEX,
    KEPT,
    KEPT_MASK,
    LOADER,
    MADE_THERE,
    PERSISTENT,
    PINNED,
    SLICE,
    STAGED,
    WINDOWS,
    WORKERS,
)
from .reads import ELEMENTS, METERS, READS, STACKED_READS, TENSOR
from .source import Edit, NotHere, Patch, Refused, SourceText, imported, keywords_of, last_name, name_of, with_keywords
from .step import TRAIN_STEP

CONFIGURATION = "from accelerate.utils import DataLoaderConfiguration"


def propose_accelerate(source: SourceText, line: int) -> list[Edit]:
    calls = [call for call in source.calls() if last_name(call) == "Accelerator"]
    if not calls:
        return _before_trainer(source, "accelerator_config.non_blocking = True")
    edits = imported(source, CONFIGURATION)
    for call in calls:
        if chosen := {"dataloader_config", "split_batches"} & keywords_of(source, call).keys():
            raise Refused(f"line {call.lineno} passes {min(chosen)}; add non_blocking=True to its DataLoaderConfiguration")
        edits += with_keywords(source, call, dataloader_config="DataLoaderConfiguration(non_blocking=True)")
    return [*edits, *_pinned(source)]


def propose_pinned(source: SourceText, line: int) -> list[Edit]:
    """Propose pinned memory for the DataLoaders of this file, whose batches the library copies with non_blocking=True."""
    if not (edits := _pinned(source)):
        raise Refused("there is no DataLoader in this file without pin_memory")
    return edits


def _pinned(source: SourceText) -> list[Edit]:
    loaders = [call for call in source.calls() if last_name(call) == "DataLoader"]
    return [
        edit
        for call in loaders
        if "pin_memory" not in keywords_of(source, call)
        for edit in with_keywords(source, call, pin_memory="True")
    ]


def propose_unfiltered(source: SourceText, line: int) -> list[Edit]:
    """Propose that Trainer logs every loss, instead of reading each to see whether it is finite."""
    return _before_trainer(source, "logging_nan_inf_filter = False")


def _before_trainer(source: SourceText, setting: str) -> list[Edit]:
    """Return an edit that changes the arguments of the file's one Trainer before it is made."""
    trainers = [call for call in source.calls() if last_name(call).endswith("Trainer") and not call.args[1:]]
    arguments = [(call, name_of(keyword.value)) for call in trainers for keyword in call.keywords if keyword.arg == "args"]
    if len(arguments) != 1 or not arguments[0][1]:
        raise Refused("there is no single Trainer(args=...) in this file that is given its arguments by a name")
    ((call, name),) = arguments
    if setting.partition(" ")[0].encode() in source.data:
        raise Refused(f"the file sets {setting.partition(' ')[0]} itself")
    statement = source.statement(call)
    return [source.inserted_line(statement.lineno, f"{source.indent(statement)}{name}.{setting}")]


ACCELERATE = Patch(
    "accelerate", frozenset({"h2d"}), "accelerate copies from pinned memory without waiting", propose_accelerate,
    via="accelerate/utils/operations.py",
)  # fmt: skip
PIN_LOADERS = Patch(
    "pin_loaders", frozenset({"h2d", "pageable"}), "Lightning copies from pinned memory", propose_pinned,
    via="fabric/utilities/apply_func.py",
)  # fmt: skip
UNFILTERED = Patch(
    "unfiltered", frozenset({"sync"}), "a loss that is not finite is logged, too", propose_unfiltered, asked=True,
    via="transformers/trainer.py",
)  # fmt: skip


SEEN_PINNED, SAME_INDEX = "(pinned,", "; the same index on lines "  # in a finding's evidence


# In the order in which they are tried: what changes least comes first.
_ORDER = (
    READS, TENSOR, ELEMENTS, STACKED_READS, METERS, KEPT_MASK, UNVALIDATED, UNFILTERED, WAITS, LOADER, PERSISTENT, ACCELERATE,
    PIN_LOADERS, PINNED, MADE_THERE, COPIES, STAGED, GATHERED, KEPT, FILLED, SLICE, INDEX, FOREACH, WINDOWS, ZERO_GRAD,
    OPTIMIZER, TRAIN_STEP, LATER, RARELY, READ_LATER, TF32, BF16,
)  # fmt: skip
PATCHES: dict[str, Patch] = {patch.name: patch for patch in _ORDER}


@dataclass(frozen=True, slots=True)
class Target:
    """The facts of a finding that a patch needs."""

    kind: str
    file: str
    line: int
    code: str = ""  # of the line when it was measured; empty if unknown
    pinned: bool = False  # whether the line was seen to copy pinned memory
    lines: tuple[int, ...] = ()  # all of them, if the finding has several
    via: str = ""  # the library's file that the line went through
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.kind} at {shorten(os.path.abspath(self.file))}:{self.line}"


@dataclass
class Repair:
    """Changes of a set of patches. Nothing is written before `apply()`."""

    changes: dict[Path, tuple[bytes, bytes]] = field(default_factory=dict)
    """Each file's bytes as they were read, and as they would be."""
    patches: dict[Target, Patch] = field(default_factory=dict)
    refused: dict[Target, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Return whether the losses must stay the same, bit for bit."""
        return all(patch.equal for patch in self.patches.values())

    def __str__(self) -> str:
        """Return a line for each finding: the effect of its patch, or the reason why there is none."""
        lines = [f"{target}: {patch.name}: {patch.does}" for target, patch in self.patches.items()]
        return "\n".join(lines + [f"{target}: not patched: {why}" for target, why in self.refused.items()])

    def diff(self, root: Path | None = None) -> str:
        """Return a unified diff, as `git apply` and `patch -p1` take it, with names relative to `root`."""
        root = (root or Path.cwd()).resolve()
        text = ""
        for path, (before, after) in self.changes.items():
            resolved = path.resolve()
            name = resolved.relative_to(root).as_posix() if resolved.is_relative_to(root) else resolved.as_posix().lstrip("/")
            old, new = _lines(before), _lines(after)
            for line in difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"):
                text += line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        return text

    def apply(self) -> list[Path]:
        """Write each file completely or not at all, if all of them are still unchanged since they were read."""
        for path, (before, _) in self.changes.items():
            with reading(path):
                now = path.read_bytes()
            if now != before:
                raise DataError(f"{path}: was changed since it was read; look for the findings again.")
            if not os.access(path, os.W_OK):
                raise DataError(f"{path}: is read-only; make it writable, or apply the diff to a copy.")
        with ExitStack() as written:
            for path, (_, after) in self.changes.items():
                resolved = path.resolve()  # follows a link
                file = written.enter_context(replacing(resolved))
                os.fchmod(file.fileno(), stat.S_IMODE(resolved.stat().st_mode))
                file.write(after)
                file.flush()  # a full disk raises before any file is replaced
        return list(self.changes)


def _lines(data: bytes) -> list[str]:
    """Return lines as git and patch count them: a form feed or a separator of Unicode ends none."""
    return [line.decode() for line in io.BytesIO(data)]


def repair(targets: Iterable[Target], asked: Collection[str] = ()) -> Repair:
    """Return patches for these findings. `asked` names patches that change the results, which are left out otherwise: tf32."""
    for name in asked:
        if name not in PATCHES:
            raise ValueError(f"fix: {name!r} is no patch; {hint(name, list(PATCHES), 'wanted one of')}")
    result = Repair()
    by_file: dict[str, list[Target]] = {}
    for target in dict.fromkeys(targets):
        by_file.setdefault(target.file, []).append(target)
    for file, targets_here in by_file.items():
        _repair_file(Path(file), targets_here, asked, result)
    return result


def _repair_file(path: Path, targets: list[Target], asked: Collection[str], result: Repair) -> None:
    try:
        source = SourceText(path)
    except (Refused, OSError) as why:
        reason = f"the file cannot be read ({why.strerror})" if isinstance(why, OSError) else str(why)
        result.refused |= dict.fromkeys(targets, reason)
        return
    read, lines = source, {target: target.line for target in targets}
    for target in [target for target in targets if target.code and source.line(target.line) != target.code]:
        result.refused[target] = "the line was changed since the script ran; look for the findings again"
    targets = [target for target in targets if target not in result.refused]
    for target, last in [(target, False) for target in targets] + [(target, True) for target in targets]:
        if target in result.patches:
            continue  # its line was changed together with an earlier target's
        try:
            patch, edits = _first_that_fits(source, target, lines[target], asked, last)
            after = SourceText(path, source.edited(edits))
        except Refused as why:
            result.refused[target] = _reason_as_read(read, target, asked, last) or str(why)
            continue
        result.refused.pop(target, None)
        result.patches[target] = patch
        for other in targets:
            if any(edit.removes(source, lines[other]) for edit in edits):
                result.patches[other] = patch
            lines[other] += sum(edit.lines(source) for edit in edits if edit.start <= source.line_start(lines[other]))
        source = after
    if source.data != read.data:
        result.changes[path] = (read.data, source.data)


def _reason_as_read(source: SourceText, target: Target, asked: Collection[str], last: bool) -> str:
    """Return the reason why the unpatched file has no patch, which names the user's lines; empty if it has one."""
    try:
        _first_that_fits(source, target, target.line, asked, last)
    except Refused as why:
        return str(why)
    return ""


def _first_that_fits(
    source: SourceText, target: Target, line: int, asked: Collection[str], last: bool
) -> tuple[Patch, list[Edit]]:
    """Return the first patch for this kind that is possible here, and its edits. There may be nothing left to change.

    read_later is the `last`: it takes what other patches have left on the device as well.
    """
    if target.remedy == ACTED:
        raise Refused(ACTED)
    reasons, on_request = dict[str, Refused](), list[str]()
    for patch in PATCHES.values():
        if target.kind not in patch.kinds or (patch.pinned and not target.pinned):
            continue
        if patch is READ_LATER and not last:
            continue
        if patch.via not in target.via or patch.remedy not in target.remedy or patch.unless == target.remedy != "":
            continue
        try:
            every = ([each + line - target.line for each in target.lines],) if patch.lines else ()
            edits = sorted(set(patch.propose(source, line, *every)))
            source.edited(edits)
        except Refused as why:
            reasons[patch.name] = why
            continue
        if not patch.asked or patch.name in asked:
            return patch, edits
        what = "output" if patch.equal else "numbers"
        on_request.append(f"{patch.name}: {patch.does}, which changes the {what}: ask for it by name")
    special = {name for name in reasons if PATCHES[name].remedy or PATCHES[name].via}
    usual = (READS.name, STAGED.name, READ_LATER.name)
    order = lambda name: (name not in special, isinstance(reasons[name], NotHere), name not in usual)  # noqa: E731
    nearest = min(reasons, key=order, default="")
    if target.remedy and not on_request and nearest and isinstance(reasons[nearest], NotHere) and nearest not in special:
        raise Refused(f"by hand: {target.remedy}")
    refused = [f"{name}: {reasons[name]}" for name in reasons if name in asked or (name == nearest and not on_request)]
    raise Refused("; ".join(refused + on_request) or f"no patch is written for {target.kind}")


def patched(verdict: Verdict, asked: Collection[str] = ()) -> tuple[Verdict, Repair]:
    """Return the verdict with a diff in each finding that a patch fixes, and the repair of all its findings.

    Harmless findings get none. `asked` names patches that change the results, such as tf32.
    """
    findings = [replace(finding, patch=repair(targets([finding]), asked).diff()) for finding in verdict.findings]
    return replace(verdict, findings=findings), repair(targets(findings), asked)


def expected_ms(verdict: Verdict, fixes: Repair) -> float | None:
    """Return milliseconds of a step with these patches, by the prices of their findings; None without prices."""
    if verdict.step_ms is None or verdict.together_ms is None:
        return None
    fixed = [finding for finding in verdict.findings if any(target in fixes.patches for target in targets([finding]))]
    saved = min(sum(finding.ms or 0.0 for finding in fixed), verdict.together_ms)
    workers = WORKERS if LOADER in fixes.patches.values() else int(verdict.loader.get("workers", 0))
    return max(verdict.step_ms - saved, verdict.loaded_ms(workers) if workers else 0.0)


def targets(findings: Iterable[Finding]) -> list[Target]:
    """Return a target for each finding with a line."""
    return [
        Target(
            finding.kind,
            line.file,
            line.line,
            line.code,
            SEEN_PINNED in finding.evidence,
            tuple(map(int, re.findall(r"\d+", finding.evidence.partition(SAME_INDEX)[2]))),
            finding.via.file.replace("\\", "/") if finding.via else "",
            finding.fix,
        )
        for finding in findings
        if (line := finding.line) is not None
    ]
