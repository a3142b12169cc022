"""Patches of batches and copies: loaders, pinned memory, tensors made where they are used, and copies that are kept.

Batches that a script makes by itself, without a loader, are copied through pinned memory, an index copied once instead of many
times, the windows of a batch taken by one index instead of a slice for each.

x = torch.tensor(rows, device=device)      x = pinned(torch.tensor(rows)).to(device, non_blocking=True)
y = a[order] + b[order]                    order_on_device = torch.as_tensor(order, device=a.device)
                                           y = a[order_on_device] + b[order_on_device]

x = torch.stack([torch.from_numpy(data[i : i + n].astype(np.int64)) for i in starts])
x = torch.from_numpy(data[(starts[:, None] + torch.arange(n)).numpy()].astype(np.int64))
"""

import ast
import re
from collections import Counter
from collections.abc import Sequence

from ...watch.events import NUMBER
from ..rules import remedies
from ..rules.remedies import ANEW
from .source import (
    LOOPS,
    Edit,
    NotHere,
    Patch,
    Refused,
    SourceText,
    check_moves_tensors,
    constant,
    helper,
    keywords_of,
    last_name,
    name_of,
    stored,
    torch_name,
    with_keywords,
)

WORKERS = 4  # decode four batches ahead: enough if decoding made a step up to four times longer, and little memory


def loaders_at(source: SourceText, line: int) -> list[ast.Call]:
    """Return the DataLoader that is created in this line, or that this line's loop iterates; else all in the file."""
    loaders = [call for call in source.calls() if last_name(call) == "DataLoader"]
    here = [call for call in source.calls(line) if call in loaders]
    over = {name_of(node) for loop in _loops(source, line) for node in ast.walk(loop.iter) if name_of(node)}
    named = [call for call in loaders if over & _targets(source, call)]
    if not loaders:
        raise Refused("there is no DataLoader in this file; gb.feed prepares the batches of any iterable ahead")
    return here or named or loaders


def loader_at(source: SourceText, line: int) -> ast.Call:
    """Return the one of `loaders_at`."""
    if len(candidates := loaders_at(source, line)) > 1:
        raise Refused(f"there are {len(candidates)} DataLoaders in this file, and the line does not say which one is meant")
    return candidates[0]


def _loops(source: SourceText, line: int) -> list[ast.For]:
    statement = source.statements_at(line)[0]  # statements of one line are in the same loops
    return [node for node in (statement, *source.above(statement)) if isinstance(node, LOOPS) and isinstance(node, ast.For)]


def _targets(source: SourceText, call: ast.Call) -> set[str]:
    statement = source.statement(call)
    return {name_of(target) for target in statement.targets} if isinstance(statement, ast.Assign) else set()


def propose_loader(source: SourceText, line: int) -> list[Edit]:
    """Propose more workers. Not persistent ones: from the second epoch on, their loader shuffles by other random numbers."""
    loader = loader_at(source, line)
    have = keywords_of(source, loader)
    workers = constant(have["num_workers"]) if "num_workers" in have else 0
    option = _option_default(source, have["num_workers"]) if workers is None else None
    workers = workers if option is None else constant(option)
    if workers is None:
        raise Refused(f"line {loader.lineno} takes num_workers from {source.text(have['num_workers'])}; raise it there")
    if not isinstance(workers, int) or workers >= WORKERS:
        raise Refused("the DataLoader has workers; if they are too slow, give it more, or decode less in __getitem__")
    if b"IterableDataset" in source.data:
        raise Refused("each worker would go over the whole IterableDataset; divide it by get_worker_info() first")
    if len(loader.args) > 5:
        raise Refused(f"line {loader.lineno} passes num_workers by its position")
    wanted = {} if "pin_memory" in have else {"pin_memory": "True"}
    if option is not None:
        raised = Edit(source.start(option), source.end(option), str(WORKERS))
        return [raised, *(with_keywords(source, loader, "num_workers", **wanted) if wanted else [])]
    return with_keywords(source, loader, "num_workers", num_workers=str(WORKERS), **wanted)


def _option_default(source: SourceText, value: ast.expr) -> ast.expr | None:
    """Return the default of the command line's option that `args.workers` or `int(args.workers)` is; None for anything else,
    and for an option that is used in another place, too."""
    read = value.args[0] if isinstance(value, ast.Call) and name_of(value.func) == "int" and len(value.args) == 1 else value
    name = read.attr if isinstance(read, ast.Attribute) and "." not in name_of(read.value) else ""
    uses = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute) and node.attr == name]
    defaults = [
        keyword.value
        for call in source.calls()
        if last_name(call) == "add_argument"
        if any(str(constant(each)).lstrip("-").replace("-", "_") == name for each in call.args)
        if all(keyword.arg != "dest" for keyword in call.keywords)
        for keyword in call.keywords
        if keyword.arg == "default"
    ]
    return defaults[0] if uses == [read] and len(defaults) == 1 and isinstance(constant(defaults[0]), int) else None


def propose_persistent(source: SourceText, line: int) -> list[Edit]:
    return with_keywords(source, loader_at(source, line), persistent_workers="True")


PERSISTENT = Patch(
    "persistent", frozenset({"data"}), "workers live on in the next epoch", propose_persistent, equal=False, asked=True,
    remedy=ANEW,
)  # fmt: skip
LOADER = Patch("loader", frozenset({"data"}), "workers prepare the batches ahead", propose_loader, unless=ANEW)


COPYING = ("to", "cuda")
DEVICE = re.compile(r"device$|rank$|gpu$|^[\"']cuda")  # texts of what is a device alone


def _copies(source: SourceText, line: int) -> list[ast.Call]:
    """Return the copies to the device that are written in this line."""
    copies = [
        call
        for call in source.calls(line)
        if isinstance(call.func, ast.Attribute)
        if last_name(call) in COPYING or (last_name(call) == "type" and _cuda_type(source, *call.args))
    ]
    if not copies:
        raise NotHere("no .to() or .cuda() is written in this line")
    for call in copies:
        check_moves_tensors(source, call)
    if any(constant(node) == "cpu" for call in copies for node in ast.walk(call)):
        raise Refused("it copies to the host, which must wait before it may read what arrives")
    if len({source.text(call.args[0]) for call in copies if call.args}) > 1:
        raise Refused("it copies to more than one place, of which one may be the host")
    return copies


def _cuda_type(source: SourceText, node: ast.AST | None = None, *more: ast.AST) -> str:
    """Return "FloatTensor" for a name that is torch.cuda.FloatTensor, perhaps on a condition; empty for anything else."""
    values = source.assigned(source.tree, node.id) if isinstance(node, ast.Name) and not more else []
    types = {match for value in values for match in re.findall(r"torch\.cuda\.(\w+Tensor)\b", source.text(value))}
    return types.pop() if len(types) == 1 else ""


def propose_copies(source: SourceText, line: int) -> list[Edit]:
    """Propose `non_blocking=True` for every copy in this line, with pinned memory from the loaders, without which it has no
    effect."""
    copies = _copies(source, line)
    for call in copies:
        if maker := _maker(source, call.func.value, frozenset()):  # type: ignore[attr-defined]
            raise NotHere(f"the line copies what {maker} makes, which no loader pins")
    try:
        loaders = loaders_at(source, line)
    except Refused as why:
        raise Refused(f"the batches must be pinned where they are made, and {why}") from None
    unpinned = [loader for loader in loaders if constant(keywords_of(source, loader).get("pin_memory")) is not True]
    edits = [edit for loader in unpinned for edit in with_keywords(source, loader, pin_memory="True")]
    return [*edits, *_without_waiting(source, copies)]


TURNING = frozenset((
    "to", "cuda", "type", "float", "long", "int", "half", "double", "bool", "view", "reshape", "permute", "transpose",
    "contiguous", "squeeze", "unsqueeze", "flatten", "detach", "t", "next", "Variable", "pin_memory",
))  # fmt: skip  # these give a batch in another form


CONVERTING = frozenset(("float", "long", "int", "half", "double", "bool"))  # with the same bits on any device


def _maker(source: SourceText, node: ast.expr, met: frozenset[str]) -> str:
    """Return what makes the value that is copied, if it cannot be a loader's batch: "arange()"; empty if it may be."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Call):
            if (name := last_name(node)) not in TURNING:
                return f"{name}()"
            node = node.func.value if isinstance(node.func, ast.Attribute) else (node.args or [node.func])[0]
        else:
            node = node.value
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare)):
        return "the computation"  # its result is new memory
    if not isinstance(node, ast.Name) or node.id in met:
        return ""
    scope, statement = source.scope(node), source.statement(node)  # the module's names are not those of its functions
    if (last := _just_before(source, statement, node.id)) is not None:
        return _maker(source, last, met)
    values = [value for value in source.assigned(statement, node.id) if source.scope(value) is scope]
    makers = [_maker(source, value, met | {node.id}) for value in values if isinstance(value, (ast.Call, ast.Subscript))]
    return makers[0] if makers and all(makers) and len(makers) == len(values) else ""


def _just_before(source: SourceText, statement: ast.stmt, name: str) -> ast.expr | None:
    """Return what the last statement before, in the same block, that assigns a name gives it; None if that is not so plain."""
    body = source.block(statement)
    before = [each for each in body[: body.index(statement)] if name in stored(each)]
    last = before[-1] if before else None
    plain = isinstance(last, ast.Assign) and [name_of(target) for target in last.targets] == [name]
    return last.value if plain and isinstance(last, ast.Assign) else None


def _without_waiting(source: SourceText, copies: list[ast.Call]) -> list[Edit]:
    """Return edits that pass non_blocking=True, and convert after the copy: `x.float().cuda()` copies new memory, no batch."""
    edits = []
    for call in copies:
        edits += with_keywords(source, call, non_blocking="True")
        inner = call.func.value  # type: ignore[attr-defined]
        words = [source.text(word.value) for word in call.keywords if word.arg != "non_blocking"]
        where = [*map(source.text, call.args), *words]
        converts = isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and last_name(inner) in CONVERTING
        if converts and not inner.args and not inner.keywords and all(map(DEVICE.search, where)) and len(where) < 2:
            before, after = source.end(inner.func.value), source.end(inner)
            conversion = source.data[before:after].decode()
            edits += [Edit(before, after, ""), Edit(source.end(call), source.end(call), conversion)]
    return edits


def propose_pinned(source: SourceText, line: int) -> list[Edit]:
    """Propose `non_blocking=True` alone, for a line that was seen to copy pinned memory."""
    return _without_waiting(source, _copies(source, line))


PINNED = Patch("pinned", frozenset({"h2d"}), "the host does not wait for the copy", propose_pinned, pinned=True)
COPIES = Patch(
    "copies", frozenset({"h2d", "pageable"}), "batches are copied from pinned memory without waiting", propose_copies
)


MADE_ALIKE = ("arange", "zeros", "ones", "full", "eye", "empty")  # with the same bits on any device


def propose_device_factory(source: SourceText, line: int) -> list[Edit]:
    """Propose `torch.ones(n, device=device)` for `torch.ones(n).to(device)`."""
    edits = []
    for call in source.calls(line):
        inner: ast.expr = call.func.value if isinstance(call.func, ast.Attribute) else call
        while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and last_name(inner) in TURNING:
            inner = inner.func.value
        if last_name(call) not in COPYING or not isinstance(inner, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        package, _, name = name_of(inner.func).rpartition(".")
        if package != torch_name(source) or name not in MADE_ALIKE or "device" in keywords_of(source, inner):
            continue
        if name == "arange" and any(isinstance(n, ast.Div) or isinstance(constant(n), float) for n in ast.walk(inner)):
            raise Refused("arange of fractions is rounded elsewhere on the device")
        values = [*call.args, *(word.value for word in call.keywords if word.arg == "device")]
        where = source.text(values[0]) if values else '"cuda"'
        if len(call.args) + len(call.keywords) > 1 or (values and not DEVICE.search(where)):
            raise Refused(f"{where} is not known to be a device alone")
        edits += [*with_keywords(source, inner, device=where), Edit(source.end(call.func.value), source.end(call), "")]
    if not edits:
        raise NotHere("the line makes no tensor by torch.zeros() and the like on the host")
    return edits


PINNED_BATCHES = "pinned"
MAKING = ("tensor", "as_tensor", "Tensor")


def propose_staged(source: SourceText, line: int) -> list[Edit]:
    """Propose copies from pinned memory, which the host does not wait for. Torch keeps that memory until the copy is done."""
    torch = torch_name(source)
    added = helper(
        source,
        PINNED_BATCHES,
        f"def {PINNED_BATCHES}(tensor):",
        f"    host = isinstance(tensor, {torch}.Tensor) and tensor.is_cpu",
        f"    return tensor.pin_memory() if host and {torch}.cuda.is_available() else tensor",
    )
    edits = [edit for call in source.calls(line) for edit in _staged(source, call, torch)]
    if not edits:
        raise NotHere("the line makes no tensor of host data on the device, and copies none by .to() or .cuda()")
    return [*edits, *added]


RESIDENT = "resident"


def propose_resident(source: SourceText, line: int) -> list[Edit]:
    """Propose to keep the copies of tensors that were seen to be the same in every step, as attributes of these tensors."""
    if b"numpy" in source.data and (b"from_numpy" in source.data or b"as_tensor" in source.data):
        raise Refused("an array may share the memory of what is copied, and change without being noticed")
    torch, edits = torch_name(source), []
    for call in _copies(source, line):
        assert isinstance(call.func, ast.Attribute)
        passed: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        if name_of(call.func.value) and passed and last_name(call) == "to":
            start, inner = source.start(call), source.end(call.func.value)
            edits += [Edit(start, start, f"{RESIDENT}("), Edit(inner, source.start(passed[0]), ", ")]
    if not edits:
        raise NotHere("the line copies no tensor that has a name by .to(device)")
    return [*edits, *_resident(source, torch)]


def _resident(source: SourceText, torch: str) -> list[Edit]:
    return helper(
        source,
        RESIDENT,
        f"def {RESIDENT}(tensor, *to, **options):",
        f"    if tensor.requires_grad or {torch}.is_inference_mode_enabled() or tensor.device.type != 'cpu':",
        "        return tensor.to(*to, **options)",
        "    kept, key = tensor.__dict__.setdefault('resident', {}), (*to, *options.items())",
        "    version, copy, copied = kept.get(key, (None, None, None))",
        "    if version != tensor._version or copy._version != copied:",
        "        copy = tensor.to(*to, **options)",
        "        kept[key] = tensor._version, copy, copy._version",
        "    return copy",
    )


def propose_gathered(source: SourceText, line: int) -> list[Edit]:
    """Propose to select on the device, `resident(a, t.device).gather(-1, t)`, for `a.gather(-1, t.cpu())` and `a[t.cpu()]`,
    whose result goes there afterwards."""
    for call in source.calls(line):
        picked = source.parents[call]
        owner = picked.value if isinstance(picked, ast.Subscript) and picked.slice is call else None
        if isinstance(picked, ast.Call) and last_name(picked) in ("gather", "index_select") and call in picked.args:
            owner = picked.func.value if isinstance(picked.func, ast.Attribute) else None
        index = name_of(call.func.value) if isinstance(call.func, ast.Attribute) and last_name(call) == "cpu" else ""
        if owner is None or not index or not name_of(owner):
            continue
        back = [each for each in source.calls() if last_name(each) == "to" and source.scope(each) is source.scope(call)]
        up = source.parents[picked]
        at_once = isinstance(up, ast.Attribute) and up.attr in COPYING  # a[t.cpu()].to(device)
        if not at_once and not any(f"{index}.device" in source.text(each) for each in back):
            raise Refused(f"what is selected by {index} may be needed on the host")
        where = f"{RESIDENT}({source.text(owner)}, {index}.device)"
        end = source.end(call.func.value)  # type: ignore[attr-defined]
        edits = [Edit(source.start(owner), source.end(owner), where), Edit(end, source.end(call), "")]
        return [*edits, *_resident(source, torch_name(source))]
    raise NotHere("the line selects nothing by an index that it reads from the device")


POSITIONS = "positions"


def propose_positions(source: SourceText, line: int) -> list[Edit]:
    """Propose to keep the positions of a mask until it changes: `x[mask]` looks for them, and waits, each time."""
    torch, edits = torch_name(source), []
    for node in source.expressions_at(line):
        if isinstance(node, ast.Subscript) and name_of(node.slice) and not isinstance(node.ctx, ast.Del):
            mask = name_of(node.slice)
            loop = source.loop(node)
            around = loop if loop is not None and source.scope(node) is source.tree else source.scope(node)
            around = source.tree if isinstance(around, ast.Module) and loop is None else around
            if mask.split(".")[0] in stored(around) and around is not source.tree:
                raise Refused(f"{mask} is another mask each time")
            edits.append(Edit(source.start(node.slice), source.end(node.slice), f"{POSITIONS}({mask})"))
    if not edits:
        raise NotHere("the line indexes by no mask that has a name")
    return [
        *edits,
        *helper(
            source,
            POSITIONS,
            f"def {POSITIONS}(mask):",
            f"    if not isinstance(mask, {torch}.Tensor) or mask.dtype != {torch}.bool or mask.is_inference():",
            "        return mask",
            f"    kept = mask.__dict__.get({POSITIONS!r})",
            "    if kept is None or kept[0] != mask._version:",
            f"        kept = mask.__dict__[{POSITIONS!r}] = mask._version, mask.nonzero(as_tuple=True)",
            "    return kept[1]",
        ),
    ]


def _staged(source: SourceText, call: ast.Call, torch: str) -> list[Edit]:
    """Return edits of a call that copies to a device: `value.to(device)`, `value.cuda()`, `torch.tensor(data, device=...)`."""
    start, end = source.start(call), source.end(call)
    device = next((keyword for keyword in call.keywords if keyword.arg == "device"), None)
    if name_of(call.func) in [f"{torch}.{name}" for name in MAKING] and device is not None and call.args:
        passed = [*call.args, *(keyword.value for keyword in call.keywords)]
        before = max(source.end(n) for n in passed if source.end(n) < source.start(device.value))
        copy = f").to({source.text(device.value)}, non_blocking=True)"
        return [Edit(start, start, f"{PINNED_BATCHES}("), Edit(before, source.end(device.value), ""), Edit(end, end, copy)]
    if (kind := _cuda_type(source, call.func)) and len(call.args) == 1 and isinstance(call.args[0], (ast.Call, ast.List)):
        if name_of(getattr(call.args[0], "func", call.args[0])) in ("len", "int"):
            return []  # a size
        copied = (
            f"{PINNED_BATCHES}({torch}.{kind}({source.text(call.args[0])})).type({source.text(call.func)}, non_blocking=True)"
        )
        return [Edit(start, end, copied)]
    if not isinstance(call.func, ast.Attribute) or last_name(call) not in ("to", "cuda"):
        return []
    check_moves_tensors(source, call)
    to_host = any(isinstance(n, ast.Constant) and n.value == "cpu" for n in ast.walk(call))
    if to_host or (last_name(call) == "to" and not call.args):
        raise Refused("it may copy to the host, which must wait before it may read what arrives")
    value = call.func.value
    if isinstance(value, ast.Call) and last_name(value) in (PINNED_BATCHES, "pin_memory"):
        known = any(keyword.arg == "non_blocking" for keyword in call.keywords)
        return [] if known else with_keywords(source, call, non_blocking="True")
    wrapped = [
        Edit(source.start(value), source.start(value), f"{PINNED_BATCHES}("),
        Edit(source.end(value), source.end(value), ")"),
    ]
    return [*wrapped, *with_keywords(source, call, non_blocking="True")]


def propose_index(source: SourceText, line: int, lines: Sequence[int]) -> list[Edit]:
    """Propose one copy of an index for all lines that were seen to copy it; one that is made there if nothing else uses it."""
    torch, statements = torch_name(source), [source.statements_at(each)[0] for each in lines or [line]]
    uses = [
        (node, each)
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        for each in remedies.index_roots(node)
        if isinstance(each, ast.Name)
    ]
    names = {each.id for _, each in uses}
    if len(names) > 1:
        on_host = {name: [value for value in source.assigned(uses[0][0], name) if _on_host(value, torch)] for name in names}
        names = {name for name in names if on_host[name]} or names
        uses = [(node, each) for node, each in uses if each.id in names]
    if len(names) != 1:
        raise (Refused if names else NotHere)("the line indexes by no name, or by several")
    if edits := _device_factory(source, min(names), uses, torch):
        return edits
    (name,), first = names, min(statements, key=lambda statement: statement.lineno)
    block = source.block(first)
    if not all(any(outer in block for outer in (statement, *source.above(statement))) for statement in statements):
        raise Refused(f"the lines that index by {name} are not in one block")
    if any(name in stored(statement) for statement in statements):
        raise Refused(f"{name} is assigned between them")
    named = [node for node, _ in uses if name_of(node.value)]
    if not named:
        raise Refused(f"what is indexed by {name} has no name")
    new = f"{name}_on_device"
    if new.encode() in source.data:
        raise Refused(f"the name {new} is taken in this file")
    copy = f"{source.indent(first)}{new} = {torch}.as_tensor({name}, device={source.text(named[0].value)}.device)"
    return [
        source.inserted_line(first.lineno, copy),
        *(Edit(source.start(each), source.end(each), new) for _, each in uses),
    ]


def propose_number(source: SourceText, line: int) -> list[Edit]:
    """Propose `x[0:1] = number` for `x[0] = number`: a slice is filled, and one place gets a tensor that is copied to it."""
    edits = []
    for statement in source.statements_at(line):
        for target in statement.targets if isinstance(statement, ast.Assign) else ():
            if not isinstance(target, ast.Subscript) or isinstance(target.slice, (ast.Tuple, ast.Slice)):
                continue
            text = source.text(target.slice)
            if not re.fullmatch(r"\d+|-1", text):
                raise Refused(f"the index {text} is no number, or one from the end")
            edits.append(Edit(source.end(target.slice), source.end(target.slice), ":" if text == "-1" else f":{int(text) + 1}"))
    if not edits:
        raise NotHere("the line writes no number into one place")
    return edits


def _on_host(value: ast.expr, torch: str) -> bool:
    """Return whether a value is that of `torch.arange(n)` and the like, on the CPU."""
    factories = [f"{torch}.{name}" for name in MADE_ALIKE]
    return isinstance(value, ast.Call) and name_of(value.func) in factories and all(k.arg != "device" for k in value.keywords)


def _device_factory(source: SourceText, name: str, uses: Sequence[tuple[ast.Subscript, ast.Name]], torch: str) -> list[Edit]:
    """Return edits that make an index on the device; none if anything but these lines uses it."""
    values, scope = source.assigned(uses[0][0], name), source.scope(uses[0][0])
    every = {id(n) for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)}
    if len(values) != 1 or not _on_host(values[0], torch) or every != {id(each) for _, each in uses}:
        return []
    assert isinstance(values[0], ast.Call)
    parameters = {each.arg for each in ast.walk(getattr(scope, "args", scope)) if isinstance(each, ast.arg)} - stored(scope)
    known = [name_of(node.value) for node, _ in uses if name_of(node.value).split(".")[0] in parameters]
    return with_keywords(source, values[0], device=f"{known[0]}.device") if known else []


def propose_slice(source: SourceText, line: int) -> list[Edit]:
    """Propose `x[:, -1:]` for `x[:, [-1]]`: a list as an index becomes a tensor, which is copied to the device each time."""
    edits = []
    for node in source.expressions_at(line):
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load) or not isinstance(node.slice, ast.Tuple):
            continue  # x[[0]] may select a column of a table
        parts = node.slice.elts
        lists = [part for part in parts if isinstance(part, ast.List)]
        others = [part for part in parts if not isinstance(part, (ast.List, ast.Slice)) and constant(part) is not Ellipsis]
        if len(lists) != 1 or others or len(lists[0].elts) != 1:
            continue
        if isinstance(source.parents[node], ast.stmt):
            raise Refused("the selection is kept, and a slice shares its memory with what it is taken from")
        text = source.text(lists[0].elts[0])
        if not re.fullmatch(r"-?\d+", text):
            raise Refused(f"the index {text} is no number")
        end = "" if text == "-1" else str(int(text) + 1)
        edits.append(Edit(source.start(lists[0]), source.end(lists[0]), f"{text}:{end}"))
    if not edits:
        raise NotHere("the line has no list of one number as an index")
    return edits


CONVERSIONS = ("astype", "long", "int", "float")  # of a slice's elements, which an index takes as well


def propose_windows(source: SourceText, line: int) -> list[Edit]:
    """Propose one index for all windows. The loop is Python's, and `i` is a tensor that is read for each slice. Both give the
    same numbers of the same type: 64 windows of 256 tokens take 0.04 ms instead of 1.3 on a CPU."""
    source.check_imports_torch()
    calls = [call for call in source.calls(line) if name_of(call.func) == "torch.stack"]
    if not calls:
        raise NotHere("the line stacks no slices of one array")
    return [edit for call in calls for edit in _by_index(source, call)]


def _by_index(source: SourceText, call: ast.Call) -> list[Edit]:
    """Return edits that leave the expression of one window, with the index of all windows as its slice."""
    match call.args, call.keywords:
        case [ast.ListComp(elt=window, generators=[ast.comprehension(target=ast.Name(id=i), iter=ast.Name() as starts)])], []:
            uses = [node for node in ast.walk(call.args[0]) if isinstance(node, ast.Name) and node.id == i]
        case _:
            uses = []
    if len(uses) != 3:  # the target, and both bounds of a slice
        raise Refused("wanted torch.stack([data[i : i + n] for i in starts])")
    is_array, piece = _slice(window)
    if not _are_random(source, starts):
        raise Refused(f"{starts.id} is not known to be drawn by torch.randint(high, (size,)) in this function")
    offset, length = _offset_and_length(source, piece, i)
    index = f"{starts.id}[:, None]{offset} + torch.arange({length})"
    index = f"({index}).numpy()" if is_array else index
    assert isinstance(piece.slice, ast.Slice) and piece.slice.lower is not None and piece.slice.upper is not None
    return [
        Edit(source.start(call), source.start(window), ""),
        Edit(source.start(piece.slice.lower), source.end(piece.slice.upper), index),
        Edit(source.end(window), source.end(call), ""),
    ]


def _slice(window: ast.expr) -> tuple[bool, ast.Subscript]:
    """Return whether a slice is of a NumPy array, which the expression of a window makes a tensor of, and the slice."""
    is_array, inner = False, window
    while isinstance(inner, ast.Call):
        if name_of(inner.func) == "torch.from_numpy" and len(inner.args) == 1:
            is_array, inner = True, inner.args[0]
        elif isinstance(inner.func, ast.Attribute) and last_name(inner) in CONVERSIONS:
            inner = inner.func.value
        else:
            break
    if not isinstance(inner, ast.Subscript) or not name_of(inner.value) or not isinstance(inner.slice, ast.Slice):
        raise Refused("what is stacked is more than a slice of a named array and its conversion")
    return is_array, inner


def _offset_and_length(source: SourceText, piece: ast.Subscript, i: str) -> tuple[str, str]:
    """Return " + 1" and "n" of the slice `i + 1 : i + 1 + n`."""
    assert isinstance(piece.slice, ast.Slice)
    begin, end = (Counter(_terms(source, limit)) for limit in (piece.slice.lower, piece.slice.upper))
    length, offset = end - begin, begin - Counter([i])
    if piece.slice.step is not None or begin[i] != 1 or end[i] != 1 or begin - end or not length:
        raise Refused(f"the slice does not go from {i} to {i} + a length")
    return "".join(f" + {term}" for term in offset.elements()), " + ".join(length.elements())


def _terms(source: SourceText, limit: ast.expr | None) -> list[str]:
    """Return the terms of a sum of names and numbers."""
    match limit:
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _terms(source, left) + _terms(source, right)
        case ast.Name() | ast.Attribute() | ast.Constant():
            return [source.text(limit)]
    raise Refused("a limit of the slice is no sum of names and numbers")


def _are_random(source: SourceText, starts: ast.Name) -> bool:
    """Return whether the starts are a vector on the host of numbers from 0 up: a slice from a negative start is another one."""
    match source.assigned(starts, starts.id):
        case [ast.Call(func=function, args=[*lowest, _, ast.Tuple(elts=[_])], keywords=[])] if len(lowest) <= 1:
            low = constant(lowest[0]) if lowest else 0
            return name_of(function) == "torch.randint" and isinstance(low, int) and low >= 0
    return False


MADE_THERE = Patch("made_there", frozenset({"h2d"}), "the tensor is made on the device", propose_device_factory)
GATHERED = Patch("gathered", frozenset({"d2h"}), "what an index selects is selected on the device", propose_gathered)
KEPT_MASK = Patch(
    "positions", frozenset({"sync"}), "the positions of a mask are kept until it changes", propose_positions,
    remedy=remedies.STAYING,
)  # fmt: skip
STAGED = Patch("staged", frozenset({"h2d"}), "host data are copied from pinned memory without waiting", propose_staged)
FILLED = Patch("filled", frozenset({"h2d"}), "a slice is filled with the number", propose_number, remedy=NUMBER.remedy)
SLICE = Patch("slice", frozenset({"h2d"}), "a slice needs no index on the device", propose_slice, remedy=remedies.SLICE)
KEPT = Patch("resident", frozenset({"repeat"}), "the copy is kept until the tensor changes", propose_resident)
INDEX = Patch("index", frozenset({"h2d"}), "the index is copied once", propose_index, lines=True)
WINDOWS = Patch("windows", frozenset({"cpu_op"}), "one index takes all windows of a batch", propose_windows)
