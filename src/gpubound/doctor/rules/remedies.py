"""Remedies by library and by use of the value, where the general one of an event does not help."""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache

from ...watch.events import DRAWING, NUMBER, SCALARS, Site, cause_of
from ...watch.ledger import LedgerRow

# Files in which a library reads or copies, and what its caller can do about it.
LIBRARIES = {
    "torch/distributions/": "pass validate_args=False, or Distribution.set_default_validate_args(False) once at the start",
    "torch/nn/modules/transformer.py": "pass is_causal (True for a causal mask), so that the mask is not compared",
    "torch/nn/utils/rnn.py": "keep the lengths on the CPU, and sort the batch by them before (enforce_sorted=True)",
    "torch/utils/tensorboard/": "write scalars every n steps, not in every one",
    "transformers/trainer.py": "pass TrainingArguments(logging_nan_inf_filter=False), and raise logging_steps",
    "transformers/masking_utils.py": "leave attention_mask out where no token is padding",
    "accelerate/optimizer.py": 'train in bf16, which needs no GradScaler: Accelerator(mixed_precision="bf16")',
    "accelerate/utils/operations.py": "pin the batches, and pass DataLoaderConfiguration(non_blocking=True)"
    " (Trainer: accelerator_config={'non_blocking': True})",
    "lightning/fabric/utilities/apply_func.py": "pass pin_memory=True to the DataLoader",
    "lightning_fabric/utilities/apply_func.py": "pass pin_memory=True to the DataLoader",
    "torchmetrics/": "pass validate_args=False, and call compute() every n steps",
    "lightning/pytorch/callbacks/progress/": "log with prog_bar=False, or TQDMProgressBar(refresh_rate=50)",
    "pytorch_lightning/callbacks/progress/": "log with prog_bar=False, or TQDMProgressBar(refresh_rate=50)",
    "torchvision/utils.py": "make and save images every n steps, not in every one",
    "tqdm/": "call set_postfix every n steps, not in every one",
    "wandb/": "log every n steps, not in every one",
}
SHOWN = re.compile(
    r"\bprint\(|\.format\(|\bf[\"']|(?<!torch)(?<!math)(?<!np)\.log(_dict|_metrics)?\((?!\))|\blogg(er|ing)\.|\.add_scalars?\(|\bset_postfix\(|\bpbar\.|\btqdm\.write\("
)
METER = re.compile(r"\.update\(.*\.item\(\)")
RARELY = "read it only in the steps that show it (if step % 50 == 0), not in every one"
RARE = "it is shown in few steps already; raise the interval if its price is worth it"
OFTEN = 0.5  # a step
SELDOM = "every n steps"  # in remedies: the line may do so already
SEVERAL = 8  # reads of a comprehension a step: it goes over a tensor
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
AT_ONCE = "read all elements at once: go over x.tolist()"
SUMMED = "add up or collect loss.detach() instead, and read the result when it is shown"
APPENDED = re.compile(r"\.append\(.*\.item\(\)")
LATER = "give the meter loss.detach(), and read its sum when it is shown"
VALUES = frozenset({"item", "print", SCALARS})  # reads of a value, not of a size and not of a mask
INDEX = "copy the index to the device once: index = torch.as_tensor(index, device=x.device)"
INDEXED = re.compile(r"[\w)]\[([A-Za-z_]\w*)\](?!\s*=[^=])")
LISTED = re.compile(r"\w\[(?:[^\[\]]*,\s*)?\[[-\d\s,]+\]")  # x[:, [-1]]
SLICE = "a list as an index is copied to the device each time: take a slice (x[:, -1:]), or index with a tensor made there once"
WRITTEN = re.compile(r"\]\s*=[^=]")  # x[i] = number
SCALAR = 16  # bytes
FACTORIES = frozenset(
    ("arange", "empty", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn", "randperm", "zeros")
)
TENSORS = frozenset(("tensor", "as_tensor", "Tensor", "FloatTensor", "LongTensor", "from_numpy"))
ON_DEVICE = "make it on the device: torch.{}(..., device=device)"
STAGED = "copy it from pinned memory with non_blocking=True (gpubound fix writes it), all that a step needs at once"
ANEW = "pass persistent_workers=True: workers start anew in every epoch (kept ones shuffle by other numbers from the second on)"
PINNED = "pass pin_memory=True to the DataLoader, and non_blocking=True here"
ACTED = "an environment needs it at once: step more environments for each read, or act with a copy of the policy on the CPU"
COPIED = re.compile(r"\.(to|cuda|copy_|type_as)\(|tensor\(|\.from_numpy\(", re.IGNORECASE)


def of_read(row: LedgerRow, count: float = 1.0) -> str:
    """Return the remedy of a wait. `count` is how often it is a step."""
    if row.place.through:  # events.THROUGH has its cause
        return cause_of("sync", row.what, row.place.through).remedy
    remedy = _of_library(row, count)
    if remedy and row.what != DRAWING:  # torch.normal checks whether or not a distribution validates
        return remedy
    if row.what in VALUES and row.place.site is not None:
        return _of_value(row.place.site, count) or cause_of("sync", row.what).remedy
    return cause_of("sync", row.what).remedy


def _of_value(site: Site, count: float) -> str:
    """Return the remedy of a value that is read to be shown or summed; empty for one that decides something."""
    statement, scope = _statement(site)
    text = ast.unparse(statement) if statement is not None else site.code
    if METER.search(text):
        return LATER
    if acts(site):
        return ACTED
    if count >= SEVERAL and statement is not None and any(isinstance(n, COMPREHENSIONS) for n in ast.walk(statement)):
        return AT_ONCE
    if SHOWN.search(text) or (scope is not None and _only_shown(statement, scope)):
        return RARELY if count > OFTEN else RARE
    if isinstance(statement, ast.AugAssign) or APPENDED.search(text):
        return SUMMED
    return ""


def _only_shown(statement: ast.stmt | None, scope: ast.AST) -> bool:
    """Return whether the name that a statement assigns is only read by statements that show it."""
    if not isinstance(statement, ast.Assign) or not isinstance(target := statement.targets[0], ast.Name):
        return False
    uses = [
        each
        for each in ast.walk(scope)
        if _is_simple(each)
        and any(isinstance(n, ast.Name) and n.id == target.id and isinstance(n.ctx, ast.Load) for n in ast.walk(each))
    ]
    tests = [n.test for n in ast.walk(scope) if isinstance(n, (ast.If, ast.While))]
    decides = any(isinstance(n, ast.Name) and n.id == target.id for test in tests for n in ast.walk(test))
    return bool(uses) and not decides and all(SHOWN.search(ast.unparse(each)) for each in uses)


def acts(site: Site) -> bool:
    """Return whether a line gives what it reads to an environment's step, or assigns it to a name that is given to one."""
    statement, scope = _statement(site)
    if statement is None or scope is None:
        return False
    steps = [
        call
        for call in ast.walk(scope)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step"
        if "env" in ast.unparse(call.func.value).lower()
    ]
    assigned = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    given = {n.id for call in steps for arg in call.args for n in ast.walk(arg) if isinstance(n, ast.Name)}
    return bool(assigned & given) or any(node in steps for node in ast.walk(statement))


def _is_simple(node: ast.AST) -> bool:
    return isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return))


def _statement(site: Site) -> tuple[ast.stmt | None, ast.AST | None]:
    """Return the plain statement around a line, which may begin before it, and the function or module that it is in."""
    tree = parsed(site.file)
    covering = [n for n in ast.walk(tree) if getattr(n, "lineno", 0) <= site.line <= (getattr(n, "end_lineno", 0) or 0)]
    statements = [n for n in covering if _is_simple(n)]
    functions = [n for n in covering if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return (statements[-1], functions[-1] if functions else tree) if statements else (None, None)  # type: ignore[return-value]


@lru_cache(maxsize=64)
def parsed(file: str) -> ast.Module:
    """Return a file's syntax tree; an empty one if it cannot be parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def of_copy(row: LedgerRow, count: float = 1.0) -> str:
    """Return the remedy of a copy by its library or its use; empty: that of its kind. `count` is how often it is a step."""
    if remedy := _of_library(row, count):
        return remedy
    code = row.place.site.code if row.place.site else ""
    if row.kind == "d2h" and SHOWN.search(code):
        return RARELY if count > OFTEN else RARE
    if row.kind == "d2h" and row.place.site is not None and acts(row.place.site):
        return ACTED
    if row.kind == "h2d" and row.pageable and row.place.site is not None and _of_loader(row.place.site):
        return PINNED
    if row.kind == "h2d" and LISTED.search(code):
        return SLICE
    if row.kind == "h2d" and row.bytes <= SCALAR * row.count and WRITTEN.search(code):
        return NUMBER.remedy
    if index_of(row):
        return INDEX
    return create_on_device(row.place.site) if row.kind == "h2d" and row.place.site is not None else ""


def create_on_device(site: Site) -> str:
    """Return the remedy of a tensor that a line makes on the CPU, from sizes or from data of the host; empty for another."""
    statement, _ = _statement(site)
    calls = [n for n in ast.walk(statement or ast.Module([], [])) if isinstance(n, ast.Call)]
    for call in calls:
        package, _, name = ast.unparse(call.func).rpartition(".")
        if name in FACTORIES and package in ("torch", "th") and all(word.arg != "device" for word in call.keywords):
            return ON_DEVICE.format(name)
    for call in calls:
        name = ast.unparse(call.func).rpartition(".")[2]
        if name in TENSORS and call.args and any(isinstance(n, ast.Name) for n in ast.walk(call.args[0])):
            return STAGED
    return ""


def _of_loader(site: Site) -> bool:
    """Return whether a line of a file with a DataLoader copies a tensor that it does not make there."""
    statement, _ = _statement(site)
    calls = [n for n in ast.walk(statement or ast.Module([], [])) if isinstance(n, ast.Call)]
    copied = [c.func.value for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in ("to", "cuda")]
    made = any(isinstance(n, ast.Call) for tensor in copied for n in ast.walk(tensor))
    makers = (n for n in ast.walk(parsed(site.file)) if isinstance(n, ast.Call))
    return bool(copied) and not made and any(ast.unparse(n.func).split(".")[-1] == "DataLoader" for n in makers)


def index_of(row: LedgerRow) -> str:
    """Return the name of the index that this line copies to the device, such as a NumPy array; empty for another copy."""
    code = row.place.site.code if row.place.site else ""
    match = INDEXED.search(code) if row.kind == "h2d" and row.place.via is None and not COPIED.search(code) else None
    return match[1] if match else ""


def _of_library(row: LedgerRow, count: float) -> str:
    file = row.place.via.file.replace("\\", "/") if row.place.via else ""
    remedy = next((remedy for part, remedy in LIBRARIES.items() if f"/{part}" in file), "")
    return RARE if count <= OFTEN and SELDOM in remedy else remedy
