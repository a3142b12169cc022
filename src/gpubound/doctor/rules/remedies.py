"""Remedies by library and by use of the value, where the general one of an event does not help."""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache

from ...watch.events import DRAWING, HOST_DATA, MASKING, NUMBER, SCALARS, Site, cause_of
from ...watch.ledger import LedgerRow

UNVALIDATED = "pass validate_args=False, or Distribution.set_default_validate_args(False) once at the start"
LOGGED = "log the tensor itself, as x.detach(): a number is copied to the GPU"
# Files, and functions, in which a library reads or copies, and what its caller can do about it.
LIBRARIES = {
    "torch/distributions/": UNVALIDATED,
    "torch/nn/modules/transformer.py": "pass is_causal (True for a causal mask), so that the mask is not compared",
    "torch/nn/utils/rnn.py": "keep the lengths on the CPU, and sort the batch by them before (enforce_sorted=True)",
    "torch/utils/tensorboard/": "write scalars every n steps, not in every one",
    "transformers/trainer.py": "pass TrainingArguments(logging_nan_inf_filter=False), and raise logging_steps",
    "transformers/masking_utils.py find_packed_sequence_indices": "if no batch is packed, leave the search out:"
    " transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None",
    "transformers/masking_utils.py": "leave attention_mask out where no token is padding",
    "accelerate/optimizer.py": 'train in bf16, which needs no GradScaler: Accelerator(mixed_precision="bf16")',
    "accelerate/utils/operations.py": "pin the batches, and pass DataLoaderConfiguration(non_blocking=True)"
    " (Trainer: accelerator_config={'non_blocking': True})",
    "lightning/fabric/utilities/apply_func.py": "pass pin_memory=True to the DataLoader",
    "lightning_fabric/utilities/apply_func.py": "pass pin_memory=True to the DataLoader",
    "pytorch_lightning/core/module.py": LOGGED,
    "lightning/pytorch/core/module.py": LOGGED,
    "torchmetrics/": "pass validate_args=False, and call compute() every n steps",
    "lightning/pytorch/callbacks/progress/": "log with prog_bar=False, or TQDMProgressBar(refresh_rate=50)",
    "pytorch_lightning/callbacks/progress/": "log with prog_bar=False, or TQDMProgressBar(refresh_rate=50)",
    "torchvision/utils.py": "make and save images every n steps, not in every one",
    "tqdm/": "call set_postfix every n steps, not in every one",
    "wandb/": "log every n steps, not in every one",
}
SHOWN = re.compile(
    r"\bprint\(|\.format\(|\bf[\"']|(?<!torch)(?<!math)(?<!np)\.log(_dict|_metrics)?\((?!\))|\blogg(er|ing)\.|\blog\.(info|debug|warning)\(|\.add_scalars?\(|\bset_postfix\(|\bpbar\.|\.write\("
)
METER = re.compile(r"\.update\(.*\.item\(\)")
RARELY = "read it only in the steps that show it (if step % 50 == 0), not in every one"
RARE = "it is shown in few steps already; raise the interval if its price is worth it"
RAISED = "it is shown every few steps: raise that interval"
STAYING = "; if the mask stays the same, index by its nonzero() from before the loop"
CLOCKED = "it is there for a clock: time many steps at once, or take torch.cuda.Event(enable_timing=True)"
OFTEN = 0.5  # a step
SELDOM = "every n steps"  # in remedies: the line may do so already
LISTING = re.compile(r"\.(values|items|parameters|named_parameters)\(")  # loops over a list of tensors
SEVERAL = 8  # reads of a comprehension a step: it goes over a tensor
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
AT_ONCE = "read all elements at once: go over x.tolist()"
STACKED = "read them at once: torch.stack([...]).tolist()"
EACH = f"each round of this loop waits: compute before it for all rows, and {AT_ONCE}"
SUMMED = "add up or collect {} instead, and read the result when it is shown"
APPENDED = re.compile(r"\.append\(.*(\.item|\.cpu|float|int)\(")
ACCUMULATED = "keep what it indexes on the device as well, and add all at once: index_put_(..., accumulate=True) or bincount"
BEST = "keep the best on the device (best = torch.minimum(best, loss.detach())), and read it when it is shown"
LEAVES = "test it every few rounds alone, and cut off what came too much"
BRANCHES = "the host branches on it: choose on the device by torch.where or a factor of 0, or by the value of the step before"
ASSERTED = "test it on the host before the copy, or leave it out: python -O does"
LATER = "give the meter loss.detach(), and read its sum when it is shown"
VALUES = frozenset({"item", "print", SCALARS})  # reads of a value, not of a size and not of a mask
INDEX = "copy the index to the device once: index = torch.as_tensor(index, device=x.device)"
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
    if (site := row.place.site) is not None:
        if row.what in VALUES:
            return _of_value(site, count) or cause_of("sync", row.what).remedy
        if "synchronize" in row.what and is_timed(site):
            return CLOCKED
    return cause_of("sync", row.what).remedy + (STAYING if row.what == MASKING else "")


def _of_value(site: Site, count: float) -> str:
    """Return the remedy of a value that is read to be shown, summed or decided by; empty for another."""
    tree = parsed(site.file)
    statement, scope = _statement(site)
    text = ast.unparse(statement) if statement is not None else site.code
    if METER.search(text):
        return LATER
    if acts(site):
        return ACTED
    test = next((n for n in ast.walk(tree) if isinstance(n, (ast.If, ast.While)) and _covers(n.test, site.line)), None)
    where = statement or (test.test if test is not None else None)
    if count >= 2 and where is not None and (several := _of_several(where, count, scope or tree)):
        return several
    if count >= 2 and _goes_over_rows(site.line, scope or tree):
        return EACH
    if isinstance(statement, ast.Assert):
        return ASSERTED
    if SHOWN.search(text):
        return _shown(site, count)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Subscript) and not _calls(statement.value):
        return ACCUMULATED
    if isinstance(statement, ast.AugAssign) or APPENDED.search(text) or SUMS.search(text):
        return SUMMED.format(_tensor(statement))
    if test is not None:
        return _of_test(test)
    uses = _uses(statement, scope, tree)
    uses = [use for use in uses if not (isinstance(use, ast.If) and "isinstance(" in ast.unparse(use.test))]
    if any(isinstance(use, (ast.If, ast.While)) for use in uses):
        return BRANCHES
    if uses and all(SHOWN.search(ast.unparse(use)) for use in uses):
        return _shown(site, count)
    summed = [isinstance(use, ast.AugAssign) or bool(SUMS.search(ast.unparse(use))) for use in uses]
    if any(summed) and all(sums or SHOWN.search(ast.unparse(use)) for sums, use in zip(summed, uses)):
        return SUMMED.format("the tensor")
    return ""


SUMS = re.compile(r"\.append\(|^(?P<sum>[\w.\[\] +]+) = (?P=sum) \+ ")


def _covers(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)


def _calls(node: ast.AST) -> list[ast.Call]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Call)]


def _called(call: ast.Call) -> str:
    """Return the name that is called: "item" of `loss.item()`."""
    return ast.unparse(call.func).split(".")[-1]


READERS = frozenset({"item", "cpu", "tolist", "int", "float", "bool"})


def _read_in(node: ast.AST) -> list[ast.expr]:
    """Return what an expression reads by `x.item()`, `float(x)` and the like."""
    calls = [call for call in _calls(node) if _called(call) in READERS]
    return [x for call in calls for x in ([call.func.value] if isinstance(call.func, ast.Attribute) else call.args[:1])]


def _tensor(statement: ast.stmt | None) -> str:
    """Return the expression to keep instead of `name.item()`."""
    names = {ast.unparse(x).removesuffix(".detach()") for x in _read_in(statement or ast.Pass())}
    return f"{names.pop()}.detach()" if len(names) == 1 and all(name.isidentifier() for name in names) else "the tensor"


def _of_several(statement: ast.AST, count: float, scope: ast.AST) -> str:
    """Return the remedy of a comprehension or loop that reads a value for each element of a tensor, or of a list of them."""
    loops = [n for n in ast.walk(scope) if isinstance(n, ast.For) and statement in ast.walk(n)]
    counters = {n.id for loop in loops[-1:] for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    for x in _read_in(statement):
        if isinstance(x, ast.Subscript) and isinstance(x.slice, ast.Name) and x.slice.id in counters:
            return AT_ONCE
        if isinstance(x, ast.Name) and x.id in counters and LISTING.search(ast.unparse(loops[-1].iter)):
            return STACKED
    for each in (n for n in ast.walk(statement) if isinstance(n, COMPREHENSIONS)):
        over, parts = each.generators[0], [each.key, each.value] if isinstance(each, ast.DictComp) else [each.elt]
        own = {n.id for n in ast.walk(over.target) if isinstance(n, ast.Name)}
        read = [x for part in parts for x in _read_in(part)]
        listed = LISTING.search(ast.unparse(over.iter))
        if read and (listed or not all(isinstance(x, ast.Name) and x.id in own for x in read)):
            return STACKED
        if count >= SEVERAL:
            return AT_ONCE
    return ""


def _goes_over_rows(line: int, scope: ast.AST) -> bool:
    """Return whether a line reads what a loop around it takes from a tensor, by its counter or as a row of it."""
    for loop in (n for n in ast.walk(scope) if isinstance(n, ast.For) and _covers(n, line)):
        trains = any(_called(call) in ("backward", "step", "grad") for call in _calls(loop))
        if trains or _covers(loop.iter, line) or LISTING.search(ast.unparse(loop.iter)):
            continue
        own = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        inside, rows = [n for each in loop.body for n in ast.walk(each)], _rows_of(loop)
        for assigned in (n for n in inside if isinstance(n, ast.Assign)):
            rows |= _stored(assigned) if any(_takes_row(x, own) for x in ast.walk(assigned.value)) else set()
        read = [x for n in inside if isinstance(n, ast.Call) and n.lineno == line for x in _read_in(n)]
        tests = [n.test for n in inside if isinstance(n, (ast.If, ast.While)) and n.lineno == line]
        read += [x for test in tests for n in ast.walk(test) if isinstance(n, ast.Compare) for x in (n.left, *n.comparators)]
        parts = [part for x in read for part in ast.walk(x)]
        if any(_takes_row(x, own) or (isinstance(x, ast.Name) and x.id in rows) for x in parts):
            return True
    return False


def _rows_of(loop: ast.For) -> set[str]:
    """Return the names of a loop that are parts of what has a name: "x" of `for i, x in enumerate(row)`."""
    over, target = loop.iter, loop.target
    called = isinstance(over, ast.Call) and _called(over) in ("enumerate", "reversed", "zip")
    tensors = over.args if called else [over]  # type: ignore[attr-defined]
    if called and _called(over) == "enumerate" and isinstance(target, ast.Tuple):  # type: ignore[arg-type]
        target = target.elts[1]
    known = all(isinstance(each, ast.Name) for each in tensors)
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)} if known else set()


def _takes_row(node: ast.AST, own: set[str]) -> bool:
    """Return whether an expression is `x[i]`, or `row[...]`, of a loop's own names."""
    if not isinstance(node, ast.Subscript):
        return False
    root: ast.expr = node
    while isinstance(root, (ast.Subscript, ast.Attribute)):
        root = root.value
    return any(isinstance(n, ast.Name) and n.id in own for n in (root, node.slice))


def _shown(site: Site, count: float) -> str:
    """Return the remedy of a value that is shown `count` times a step."""
    inside = (n for n in ast.walk(parsed(site.file)) if isinstance(n, ast.If) and _covers(n, site.line))
    every = any(isinstance(n, ast.Mod) for each in inside for n in ast.walk(each.test))
    return RARE if count <= OFTEN else RAISED if every else RARELY


def _of_test(test: ast.If | ast.While) -> str:
    """Return the remedy of a branch on a value of the device."""
    compared = {ast.unparse(n) for n in ast.walk(test.test) if isinstance(n, (ast.Name, ast.Attribute))}
    targets = [
        {ast.unparse(target) for target in each.targets} if isinstance(each, ast.Assign) else set() for each in test.body
    ]
    if isinstance(test.test, ast.Compare) and all(targets) and compared & set().union(*targets):
        return BEST
    return LEAVES if any(isinstance(each, ast.Break) for each in test.body) else BRANCHES


def _targets(statement: ast.stmt | None, scope: ast.AST | None, tree: ast.AST) -> list[tuple[set[str], ast.AST]]:
    """Return the names that get what a statement reads, and where: of a returned value those of its calls in this file."""
    if isinstance(statement, ast.Return) and isinstance(scope, FUNCTIONS):
        assigned = (n for n in ast.walk(tree) if isinstance(n, ast.Assign) and not _covers(scope, n.lineno))
        getting = [n for n in assigned if any(_called(c) == scope.name for c in _calls(n.value))]
        return [(_stored(n), _around(n, tree)) for n in getting]
    return [(_stored(statement), scope)] if statement is not None and scope is not None else []


def _stored(statement: ast.stmt) -> set[str]:
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _around(statement: ast.AST, tree: ast.AST) -> ast.AST:
    """Return the innermost function around a statement, or the module."""
    line = getattr(statement, "lineno", 0)
    return [tree, *(n for n in ast.walk(tree) if isinstance(n, FUNCTIONS) and _covers(n, line))][-1]


def _uses(statement: ast.stmt | None, scope: ast.AST | None, tree: ast.AST, deep: int = 2) -> list[ast.stmt]:
    """Return the statements, and the branches by their test, that use what a statement assigns to a name, or returns."""
    uses: list[ast.stmt] = []
    if not isinstance(statement, (ast.Assign, ast.Return)) or not deep:
        return uses
    if isinstance(statement, ast.Return) and isinstance(scope, FUNCTIONS):
        others = (n for n in ast.walk(tree) if isinstance(n, (ast.AugAssign, ast.Expr)) and not _covers(scope, n.lineno))
        uses += (n for n in others if any(_called(c) == scope.name for c in _calls(n)))
    for names, where in _targets(statement, scope, tree):
        for each in ast.walk(where):
            part = each.test if isinstance(each, (ast.If, ast.While)) else each if _is_simple(each) else None
            loads = (n for n in ast.walk(part or ast.Pass()) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
            if each is not statement and any(n.id in names for n in loads) and _around(each, tree) is where:
                uses += (isinstance(each, ast.Return) and _uses(each, where, tree, deep - 1)) or [each]  # type: ignore[list-item]
    return uses


def acts(site: Site) -> bool:
    """Return whether a line gives what it reads to an environment's step, or to a name that is given to one."""
    statement, scope = _statement(site)
    if statement is None or scope is None:
        return False
    if any(call in _env_steps(scope) for call in _calls(statement)):
        return True
    for names, where in _targets(statement, scope, parsed(site.file)):
        given = {n.id for call in _env_steps(where) for arg in call.args for n in ast.walk(arg) if isinstance(n, ast.Name)}
        if names & given:
            return True
    return False


def _env_steps(scope: ast.AST) -> list[ast.Call]:
    calls = (call for call in _calls(scope) if isinstance(call.func, ast.Attribute) and call.func.attr == "step")
    return [call for call in calls if "env" in ast.unparse(call.func.value).lower()]  # type: ignore[attr-defined]


CLOCKS = ("time", "perf_counter", "perf_counter_ns", "monotonic", "time_ns", "elapsed_time")


def is_timed(site: Site) -> bool:
    """Return whether a clock is read in the line before or after a wait, or in its own."""
    lines = range(site.line - 1, site.line + 2)
    calls = (call for call in _calls(parsed(site.file)) if call.lineno in lines)
    return any(_called(call) in CLOCKS for call in calls)


def _is_simple(node: ast.AST) -> bool:
    return isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return, ast.Assert))


def _statement(site: Site) -> tuple[ast.stmt | None, ast.AST | None]:
    """Return the plain statement around a line, which may begin before it, and the function or module that it is in."""
    tree = parsed(site.file)
    covering = [n for n in ast.walk(tree) if _covers(n, site.line)]
    statements = [n for n in covering if _is_simple(n)]
    functions = [n for n in covering if isinstance(n, FUNCTIONS)]
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
    if index_of(row):
        return INDEX
    if (site := row.place.site) is None:
        return ""
    if row.kind == "d2h":
        return _of_value(site, count)
    if row.pageable and _of_loader(site):
        return PINNED
    if LISTED.search(site.code):
        return SLICE
    if row.bytes <= SCALAR * row.count and WRITTEN.search(site.code) and not COPIED.search(site.code):
        return NUMBER.remedy
    return create_on_device(site)


def reads_result(site: Site | None) -> bool:
    """Return whether a line reads what it computes from what it copies to the device: `model(x.to(device)).cpu()`."""
    statement = _statement(site)[0] if site is not None else None
    calls = _calls(statement or ast.Module([], []))
    down = [call for call in calls if _called(call) in READERS or any(ast.unparse(arg) == "'cpu'" for arg in call.args)]
    up = [call for call in calls if _called(call) in ("to", "cuda") and call not in down]
    below = {call for outer in up for call in _calls(outer)}
    return any(call in up for outer in down for call in _calls(outer)) and below.isdisjoint(down)


def create_on_device(site: Site) -> str:
    """Return the remedy of a tensor that a line makes on the CPU, from sizes or from data of the host; empty for another."""
    statement, _ = _statement(site)
    calls = _calls(statement or ast.Module([], []))
    for call in calls:
        package, _, name = ast.unparse(call.func).rpartition(".")
        plain = package in ("torch", "th") and all(word.arg != "device" for word in call.keywords)
        if name in FACTORIES and plain and not _joined(call, calls):
            return ON_DEVICE.format(name)
    for call in calls:
        name = _called(call)
        if name in TENSORS and call.args:
            names = [n for n in ast.walk(call.args[0]) if isinstance(n, ast.Name)]
            return STAGED if names else HOST_DATA.remedy
    on_host = (n for n in ast.walk(parsed(site.file)) if _makes_on_host(n, _copied(calls)))
    return next((ON_DEVICE.format(_called(n.value)) for n in on_host), "")  # type: ignore[attr-defined]


def _copied(calls: list[ast.Call]) -> set[str]:
    """Return the expressions that these calls copy to a device."""
    return {
        ast.unparse(c.func.value) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in ("to", "cuda", "type")
    }


def _joined(call: ast.Call, calls: list[ast.Call]) -> bool:
    """Return whether a call's result is copied together with others, which are on the CPU, too."""
    joins = (each for each in calls if _called(each) in ("cat", "stack", "concat", "hstack", "vstack"))
    return any(call in ast.walk(each) for each in joins)


def _of_loader(site: Site) -> bool:
    """Return whether a line of a file with a DataLoader copies a tensor that its function does not make."""
    statement, scope = _statement(site)
    calls = _calls(statement or ast.Module([], []))
    copied, tree = _copied(calls), parsed(site.file)
    on_host = any("(" in text or _is_computed(text, statement, scope) for text in copied)
    on_host |= any(_makes_on_host(n, copied) for n in ast.walk(tree))
    return bool(copied) and not on_host and any(_called(call) == "DataLoader" for call in _calls(tree))


MAKING = FACTORIES | TENSORS | {"cat", "concat", "hstack", "stack", "vstack"}


def _is_computed(name: str, statement: ast.stmt | None, scope: ast.AST | None) -> bool:
    """Return whether the last statement before that assigns a name gives it a new tensor: torch.cat(), or a result."""
    line = getattr(statement, "lineno", 0)
    assignments = [n for n in ast.walk(scope or ast.Pass()) if isinstance(n, ast.Assign) and n.lineno < line]
    values = [n.value for n in assignments if [ast.unparse(target) for target in n.targets] == [name]]
    value = values[-1] if values else None
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and _called(value) not in MAKING:
        value = value.func.value  # `(a == b).float()`
    return isinstance(value, (ast.BinOp, ast.Compare, ast.UnaryOp)) or (
        isinstance(value, ast.Call) and _called(value) in MAKING
    )


def index_of(row: LedgerRow) -> str:
    """Return the name of the index that this line copies to the device, such as a NumPy array; empty for another copy."""
    site = row.place.site or row.place.built  # backward copies it again
    if row.kind not in ("h2d", "repeat") or row.place.via is not None or site is None or COPIED.search(site.code):
        return ""
    statement, _ = _statement(site)
    reads = [n for n in ast.walk(statement or ast.Pass()) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Load)]
    roots = [root for each in reads for root in index_roots(each)]
    names = {root.id for root in roots if isinstance(root, ast.Name)}
    if len(names) > 1:  # the others may be on the device
        tree = parsed(site.file)
        names = {name for name in names if any(_makes_on_host(n, {name}) for n in ast.walk(tree))}
    return names.pop() if len(names) == 1 and not any(isinstance(root, ast.Call) for root in roots) else ""


def _makes_on_host(node: ast.AST, names: set[str]) -> bool:
    """Return whether a statement gives `torch.arange(n)` and the like, on the CPU, one of these names."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or ast.unparse(node.targets[0]) not in names:
        return False
    package, _, name = ast.unparse(node.value.func).rpartition(".")
    return package in ("torch", "th") and name in FACTORIES and all(word.arg != "device" for word in node.value.keywords)


def index_roots(node: ast.Subscript) -> list[ast.expr]:
    """Return what `x[i]`, `x[i, j]` and `x[i[:, 0], i[:, 1]]` index by: i, and j."""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return [part.value if isinstance(part, ast.Subscript) else part for part in parts]


def _of_library(row: LedgerRow, count: float) -> str:
    via = f"{row.place.via.file.replace(chr(92), '/')} {row.place.via.function}" if row.place.via else ""
    remedy = next((remedy for part, remedy in LIBRARIES.items() if f"/{part}" in via), "")
    return RARE if count <= OFTEN and SELDOM in remedy else remedy
