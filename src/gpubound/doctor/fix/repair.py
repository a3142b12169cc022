"""Patches for findings: chosen, combined into a diff, and written on request.

Patches of one call or one line are here: waits, loaders, copies, zeroed gradients, optimizers, the precision of products.
"""

import ast
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
from ...watch.source_line import shorten
from ..finding import Finding, Verdict
from .autocast import BF16
from .libraries import ACCELERATE, PIN_LOADERS, UNFILTERED
from .meters import METERS
from .reads import ELEMENTS, RARELY, READS
from .source import (
    LOOPS,
    Edit,
    Patch,
    Refused,
    SourceText,
    check_moves_tensors,
    constant,
    imported,
    keywords_of,
    last_name,
    makers,
    name_of,
    with_keywords,
)
from .step import TRAIN_STEP
from .uploads import INDEX, SLICE, STAGED, UNVALIDATED
from .windows import WINDOWS

WAITING = ("synchronize", "empty_cache")
CLOCKS = ("time", "perf_counter", "perf_counter_ns", "monotonic", "time_ns", "elapsed_time")


def propose_waits(source: SourceText, line: int) -> list[Edit]:
    statement = source.statement_at(line, *WAITING)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or last_name(call) not in WAITING:
        raise Refused(f"the line is no plain {' or '.join(f'{name}()' for name in WAITING)}")
    if not source.text(call.func).startswith(("torch.", "cuda.")):
        raise Refused("the line waits for one stream or event, which may order a read after a copy")
    if last_name(call) == "synchronize" and (other := _needs_order(source)):
        raise Refused(f"line {other} works on another stream or copies to the host without waiting, and may rely on it")
    block = source.block(statement)
    if _is_timed(block, statement):
        raise Refused("a clock is read next to it, which would then time launches instead of work")
    if len(block) == 1:
        return [Edit(source.start(statement), source.end(statement), "pass")]
    return [Edit(*source.line_range(statement, statement), "")]


def _needs_order(source: SourceText) -> int:
    """Return the first line of the file that might be wrong without a wait; 0 for none."""
    for call in source.calls():
        late = any(keyword.arg == "non_blocking" and constant(keyword.value) is not False for keyword in call.keywords)
        to_host = last_name(call) in ("copy_", "cpu") or any(constant(node) == "cpu" for node in ast.walk(call))
        if last_name(call) == "Stream" or (late and to_host):
            return call.lineno
    return 0


def _is_timed(block: list[ast.stmt], statement: ast.stmt) -> bool:
    """Return whether the statement right before or after reads a clock."""
    at = block.index(statement)
    neighbours = [*block[max(0, at - 1) : at], *block[at + 1 : at + 2]]
    return any(isinstance(node, ast.Call) and last_name(node) in CLOCKS for near in neighbours for node in ast.walk(near))


WAITS = Patch("waits", frozenset({"sync", "free"}), "the host goes on at once", propose_waits)


WORKERS = 4  # decode four batches ahead: enough if decoding made a step up to four times longer, and little memory


def loader_at(source: SourceText, line: int) -> ast.Call:
    """Return the DataLoader that is created in this line, or that this line's loop iterates, or the only one in the file."""
    loaders = [call for call in source.calls() if last_name(call) == "DataLoader"]
    here = [call for call in source.calls(line) if call in loaders]
    over = {name_of(node) for loop in _loops(source, line) for node in ast.walk(loop.iter) if name_of(node)}
    named = [call for call in loaders if over & _targets(source, call)]
    candidates = here or named or loaders
    if not candidates:
        raise Refused("there is no DataLoader in this file; gb.feed prepares the batches of any iterable ahead")
    if len(candidates) > 1:
        raise Refused(f"there are {len(candidates)} DataLoaders in this file, and the line does not say which one is meant")
    return candidates[0]


def _loops(source: SourceText, line: int) -> list[ast.For]:
    statement = source.statements_at(line)[0]  # statements of one line are in the same loops
    return [node for node in (statement, *source.above(statement)) if isinstance(node, LOOPS) and isinstance(node, ast.For)]


def _targets(source: SourceText, call: ast.Call) -> set[str]:
    statement = source.statement(call)
    return {name_of(target) for target in statement.targets} if isinstance(statement, ast.Assign) else set()


def propose_loader(source: SourceText, line: int) -> list[Edit]:
    loader = loader_at(source, line)
    have = keywords_of(source, loader)
    workers = constant(have["num_workers"]) if "num_workers" in have else 0
    if workers is None:
        raise Refused(f"line {loader.lineno} takes num_workers from {source.text(have['num_workers'])}; raise it there")
    if not isinstance(workers, int) or workers >= WORKERS:
        raise Refused("the DataLoader has workers; if they are too slow, give it more, or decode less in __getitem__")
    if b"IterableDataset" in source.data:
        raise Refused("each worker would go over the whole IterableDataset; divide it by get_worker_info() first")
    if len(loader.args) > 5:
        raise Refused(f"line {loader.lineno} passes num_workers by its position")
    wanted = {"num_workers": str(WORKERS)}
    if "persistent_workers" not in have and not _is_touched(source, loader):
        wanted["persistent_workers"] = "True"
    if "pin_memory" not in have:
        wanted["pin_memory"] = "True"
    return with_keywords(source, loader, "num_workers", **wanted)


def _is_touched(source: SourceText, loader: ast.Call) -> bool:
    """Return whether the file uses the dataset itself, such as setting its epoch: persistent workers do not see that."""
    dataset = name_of(loader.args[0]) if loader.args else ""
    return bool(dataset) and any(
        isinstance(node, ast.Attribute) and name_of(node.value) == dataset for node in ast.walk(source.tree)
    )


LOADER = Patch("loader", frozenset({"data"}), "workers prepare the batches ahead", propose_loader)


COPYING = ("to", "cuda")


def _copies(source: SourceText, line: int) -> list[ast.Call]:
    """Return the copies to the device that are written in this line."""
    copies = [call for call in source.calls(line) if isinstance(call.func, ast.Attribute) and last_name(call) in COPYING]
    if not copies:
        raise Refused("no .to() or .cuda() is written in this line")
    for call in copies:
        check_moves_tensors(source, call)
    if any(constant(node) == "cpu" for call in copies for node in ast.walk(call)):
        raise Refused("it copies to the host, which must wait before it may read what arrives")
    if len({source.text(call.args[0]) for call in copies if call.args}) > 1:
        raise Refused("it copies to more than one place, of which one may be the host")
    return copies


def propose_copies(source: SourceText, line: int) -> list[Edit]:
    """Propose `non_blocking=True` for every copy in this line, with pinned memory from the loader, without which it has no
    effect."""
    copies = _copies(source, line)
    if host_data := {maker for call in copies for maker in makers(call)} & {"tensor", "as_tensor", "Tensor", "from_numpy"}:
        raise Refused(f"the line makes what it copies by {min(host_data)}(), so that no loader pins it")
    try:
        loader = loader_at(source, line)
    except Refused as why:
        raise Refused(f"the batches must be pinned where they are made, and {why}") from None
    pinned = constant(keywords_of(source, loader).get("pin_memory")) is True
    edits = [] if pinned else with_keywords(source, loader, pin_memory="True")
    return [*edits, *_without_waiting(source, copies)]


def _without_waiting(source: SourceText, copies: list[ast.Call]) -> list[Edit]:
    return [edit for call in copies for edit in with_keywords(source, call, non_blocking="True")]


def propose_pinned(source: SourceText, line: int) -> list[Edit]:
    """Propose `non_blocking=True` alone, for a line that was seen to copy pinned memory."""
    return _without_waiting(source, _copies(source, line))


SEEN_PINNED, SAME_INDEX = "(pinned,", "; the same index on lines "  # in a finding's evidence
PINNED = Patch("pinned", frozenset({"h2d"}), "the host does not wait for the copy", propose_pinned, pinned=True)
COPIES = Patch(
    "copies", frozenset({"h2d", "pageable"}), "batches are copied from pinned memory without waiting", propose_copies
)


def propose_zero_grad(source: SourceText, line: int) -> list[Edit]:
    calls = [call for call in source.calls(line) if last_name(call) == "zero_grad"]
    for call in calls:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if len(values) == 1 and constant(values[0]) is False:
            assert isinstance(call.func, ast.Attribute)
            return [Edit(source.end(call.func), source.end(call), "()")]
    raise Refused("no zero_grad(set_to_none=False) is written in this line")


ZERO_GRAD = Patch("zero_grad", frozenset({"optimizer", "zero_grad"}), "gradients are made anew", propose_zero_grad)


FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


def propose_optimizer(source: SourceText, line: int) -> list[Edit]:
    optimizers = [call for call in source.calls() if last_name(call) in FUSED]
    here = [call for call in source.calls(line) if call in optimizers]
    candidates = here or optimizers
    if len(candidates) != 1:
        raise Refused(f"{len(candidates) or 'none'} of {', '.join(FUSED)} is made in this file, wanted one")
    (call,) = candidates
    have = keywords_of(source, call)
    if (old := have.get("foreach")) is None:
        return with_keywords(source, call, fused="True")
    if "fused" in have:
        raise Refused(f"line {call.lineno} passes both foreach and fused; leave foreach out and set fused=True")
    at = source.start(old) - len("foreach=")
    if source.data[at : source.start(old)] != b"foreach=":
        raise Refused(f"line {call.lineno} writes foreach in an unusual way; set fused=True there")
    return [Edit(at, source.end(old), "fused=True")]


OPTIMIZER = Patch("optimizer", frozenset({"optimizer"}), "one kernel updates all parameters", propose_optimizer, equal=False)


LINE = 'torch.set_float32_matmul_precision("high")'


def propose_precision(source: SourceText, line: int) -> list[Edit]:
    if b"set_float32_matmul_precision" in source.data or b"allow_tf32" in source.data or b"fp32_precision" in source.data:
        raise Refused("the file sets the precision of fp32 products itself")
    source.check_imports_torch()
    return imported(source, LINE)


TF32 = Patch("tf32", frozenset({"precision"}), "fp32 products run in TF32", propose_precision, equal=False, asked=True)


# In the order in which they are tried: what changes least comes first.
PATCHES: dict[str, Patch] = {
    patch.name: patch
    for patch in (
        READS,
        ELEMENTS,
        METERS,
        UNVALIDATED,
        UNFILTERED,
        WAITS,
        LOADER,
        ACCELERATE,
        PIN_LOADERS,
        PINNED,
        COPIES,
        STAGED,
        SLICE,
        INDEX,
        WINDOWS,
        ZERO_GRAD,
        OPTIMIZER,
        TRAIN_STEP,
        RARELY,
        TF32,
        BF16,
    )
}


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
    before, lines = source.data, {target: target.line for target in targets}
    for target in [target for target in targets if target.code and source.line(target.line) != target.code]:
        result.refused[target] = "the line was changed since the script ran; look for the findings again"
    targets = [target for target in targets if target not in result.refused]
    for target in targets:
        if target in result.patches:
            continue  # its line was changed together with an earlier target's
        try:
            patch, edits = _first_that_fits(source, target, lines[target], asked)
            after = SourceText(path, source.edited(edits))
        except Refused as why:
            result.refused[target] = str(why)
            continue
        result.patches[target] = patch
        for other in targets:
            if any(edit.removes(source, lines[other]) for edit in edits):
                result.patches[other] = patch
            lines[other] += sum(edit.lines(source) for edit in edits if edit.start <= source.line_start(lines[other]))
        source = after
    if source.data != before:
        result.changes[path] = (before, source.data)


def _first_that_fits(source: SourceText, target: Target, line: int, asked: Collection[str]) -> tuple[Patch, list[Edit]]:
    """Return the first patch for this kind that is possible here, and its edits. There may be nothing left to change."""
    reasons, on_request = dict[str, str](), list[str]()
    for patch in PATCHES.values():
        if target.kind not in patch.kinds or (patch.pinned and not target.pinned):
            continue
        if patch.via not in target.via or patch.remedy not in target.remedy:
            continue
        try:
            every = ([each + line - target.line for each in target.lines],) if patch.lines else ()
            edits = sorted(set(patch.propose(source, line, *every)))
            source.edited(edits)
        except Refused as why:
            reasons[patch.name] = f"{patch.name}: {why}"
            continue
        if not patch.asked or patch.name in asked:
            return patch, edits
        what = "output" if patch.equal else "numbers"
        on_request.append(f"{patch.name}: {patch.does}, which changes the {what}: ask for it by name")
    refused = [reasons[name] for name in reasons if name in asked or not on_request]
    raise Refused("; ".join(refused + on_request) or f"no patch is written for {target.kind}")


def patched(verdict: Verdict, asked: Collection[str] = ()) -> tuple[Verdict, Repair]:
    """Return the verdict with a diff in each finding that a patch fixes, and the repair of all its findings.

    Harmless findings get none. `asked` names patches that change the results, such as tf32.
    """
    findings = [replace(finding, patch=repair(targets([finding]), asked).diff()) for finding in verdict.findings]
    return replace(verdict, findings=findings), repair(targets(findings), asked)


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
