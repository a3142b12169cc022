"""Let gb.TrainStep make the whole step of a plain loop, which it captures in CUDA graphs.

    optimizer.zero_grad()                  loss = train_step([(x, y)]).loss
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()

The forward becomes a function, autocast included, and TrainStep makes the optimizer: where it was made, if the loop is in a
function that reads it or is given it, and before the loop otherwise. Taken only where nothing else stands between, and where
nothing else uses the optimizer: a scheduler or a checkpoint of it would see another one.
"""

import ast
from collections.abc import Sequence

from .later import NAME as WRITE_LATER
from .plain_loop import STEP, PlainLoop, batch_of, names_in, plain_loop
from .source import Edit, Patch, Refused, SourceText, constant, imported, last_name, name_of

IMPORT = "import gpubound as gb"
NARROW = ("bfloat16", "float16", "half")  # names of 16-bit numbers, which a cast of the model has
FUNCTION = "loss_of"
OURS = {"AdamW": 0.01, "Adam": 0.0}  # optimizers that gb.AdamW computes within a graph, with their default weight decay
OPTIONS = ("lr", "betas", "eps", "weight_decay")  # in their order
KERNELS = ("foreach", "fused")  # options that choose kernels, not numbers


def propose(source: SourceText, line: int) -> list[Edit]:
    if b"GradScaler" in source.data:
        raise Refused('the file uses a GradScaler; write gb.TrainStep(..., precision="fp16"), which has its own, by hand')
    if WRITE_LATER in names_in(source.tree):
        raise Refused("another thread launches work while it writes, which would end a capture")
    if _casts(source):
        raise Refused("the file uses 16-bit numbers outside of autocast; write gb.TrainStep(..., precision=...) by hand")
    if names := {FUNCTION, STEP} & names_in(source.tree):
        raise Refused(f"the name {min(names)} is taken in this file")
    if "gb" in names_in(source.tree) and IMPORT not in map(source.text, source.tree.body):
        raise Refused("the name gb is taken in this file")
    plain = plain_loop(source, line)
    outermost = [n for n in (plain.loop, *source.above(plain.loop)) if isinstance(n, (ast.For, ast.While))][-1]
    batch = batch_of(source, plain, outermost)
    argument = batch[0] if len(batch) == 1 else f"({', '.join(batch)})"
    text = [f"{plain.loss} = {STEP}([{argument}]).loss", *map(source.text, plain.kept)]
    written = _edit_of(source, plain.forward[0], plain.step, text)
    within = [plain.zero] if not plain.forward[0].lineno <= plain.zero.lineno <= plain.step.lineno else []
    removed = [_edit_of(source, statement, statement, []) for statement in within]
    creation = plain.creation.statement
    if plain.creation.outside:
        start, end = source.line_range(creation, creation)
        edits = [Edit(start, end, _definitions(source, plain, batch, source.indent(creation)))]
    else:
        above = source.line_start(outermost.lineno)
        definitions = _definitions(source, plain, batch, source.indent(outermost))
        edits = [Edit(above, above, definitions), _edit_of(source, creation, creation, [])]
    return [*imported(source, IMPORT), *edits, written, *removed, *plain.creation.renamed]


def _casts(source: SourceText) -> bool:
    """Return whether the file names 16-bit numbers other than in a call of autocast."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in NARROW:
            calls = [outer for outer in source.above(node) if isinstance(outer, ast.Call)]
            if not any(last_name(call) == "autocast" for call in calls):
                return True
    return False


def _definitions(source: SourceText, plain: PlainLoop, batch: Sequence[str], indent: str) -> str:
    """Return the lines that define the function of the forward, and the step."""
    one = len(batch) == 1
    lines = [
        "",
        f"def {FUNCTION}({plain.model}, {batch[0] if one else 'batch'}):",
        *([] if one else [f"    {', '.join(batch)} = batch"]),
        *(f"    {text}" for statement in plain.forward for text in _dedented(source, statement)),
        f"    return {plain.loss}, {plain.loss}.new_ones(())",
        "",
        f"{STEP} = gb.TrainStep({plain.creation.model}, {FUNCTION}, {_optimizer(source, plain)}, {_options(source, plain)})",
    ]
    return "".join(f"{indent}{text}".rstrip() + source.newline for text in lines)


def _dedented(source: SourceText, statement: ast.stmt) -> list[str]:
    """Return a statement's lines; those of a block without its own indentation."""
    indent, lines = source.indent(statement), source.text(statement).splitlines()
    return [lines[0], *(line.removeprefix(indent) if isinstance(statement, ast.With) else line for line in lines[1:])]


def _optimizer(source: SourceText, plain: PlainLoop) -> str:
    """Return the optimizer as TrainStep takes it: gb.AdamW, which a graph holds, where that computes the same."""
    call = plain.creation.statement.value
    assert isinstance(call, ast.Call)
    kind = last_name(call)
    options = dict(zip(OPTIONS, call.args[1:])) | {k.arg: k.value for k in call.keywords if k.arg not in (None, *KERNELS)}
    decay = constant(options["weight_decay"]) if "weight_decay" in options else OURS.get(kind)
    known = set(options) <= set(OPTIONS) and len(call.args) <= 1 + len(OPTIONS) and all(k.arg for k in call.keywords)
    if kind in OURS and known and _is_torch(source, call) and (kind == "AdamW" or decay == 0):
        texts = {name: source.text(value) for name, value in options.items()}
        texts |= {} if "weight_decay" in options else {"weight_decay": str(OURS[kind])}
        decays = [] if decay == 0 else ["decays=lambda name, parameter: True"]  # torch's decays biases, too
        return f"gb.AdamW({', '.join([*(f'{name}={text}' for name, text in texts.items()), *decays])})"
    start, argument = source.start(call), call.args[0]
    text = source.data[start : source.start(argument)] + b"parameters" + source.data[source.end(argument) : source.end(call)]
    return f"lambda parameters: {text.decode()}"


def _is_torch(source: SourceText, call: ast.Call) -> bool:
    """Return whether an optimizer is torch's own, and not another library's of that name."""
    name = name_of(call.func)
    imports = [node for node in source.tree.body if isinstance(node, ast.ImportFrom) and node.module == "torch.optim"]
    return name.startswith(("torch.optim.", "optim.")) or any(alias.name == name for n in imports for alias in n.names)


def _options(source: SourceText, plain: PlainLoop) -> str:
    clip = [f"clip={plain.clip}"] if plain.clip else []
    fast = any(word in source.data for word in (b"allow_tf32 = True", b'set_float32_matmul_precision("high")'))
    return ", ".join([*clip, f'precision="{"tf32" if fast else "fp32"}"'])


def _edit_of(source: SourceText, first: ast.stmt, last: ast.stmt, texts: list[str]) -> Edit:
    """Replace whole lines, from those of `first` to those of `last`, by these."""
    indent = source.indent(first)
    return Edit(*source.line_range(first, last), "".join(f"{indent}{text}{source.newline}" for text in texts))


TRAIN_STEP = Patch("step", frozenset({"launch_bound"}), "gb.TrainStep makes the step, as CUDA graphs", propose, equal=False)
