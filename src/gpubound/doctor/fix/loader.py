"""Let a DataLoader's workers prepare the batches while the device computes."""

import ast

from .patch import Patch
from .source import LOOPS, Edit, Refused, SourceText, constant, last_name, name_of, with_keywords

WORKERS = 4  # decode four batches ahead: enough for a step that decoding made up to four times longer, little memory


def loader_at(source: SourceText, line: int) -> ast.Call:
    """The DataLoader that is made in this line, or that this line's loop goes over, or the only one in the file."""
    loaders = [call for call in source.calls() if last_name(call) == "DataLoader"]
    here = [call for call in source.calls(line) if call in loaders]
    over = {name_of(node) for loop in _loops(source, line) for node in ast.walk(loop.iter) if name_of(node)}
    named = [call for call in loaders if over & _targets(source, call)]
    found = here or named or loaders
    if not found:
        raise Refused("there is no DataLoader in this file; gb.feed prepares the batches of any iterable ahead")
    if len(found) > 1:
        raise Refused(f"there are {len(found)} DataLoaders in this file, and the line does not say which one is meant")
    return found[0]


def _loops(source: SourceText, line: int) -> list[ast.For]:
    statement = source.statements_at(line)[0]  # those beside it are in the same loops
    return [node for node in (statement, *source.above(statement)) if isinstance(node, LOOPS) and isinstance(node, ast.For)]


def _targets(source: SourceText, call: ast.Call) -> set[str]:
    statement = source.statement(call)
    return {name_of(target) for target in statement.targets} if isinstance(statement, ast.Assign) else set()


def propose(source: SourceText, line: int) -> list[Edit]:
    loader = loader_at(source, line)
    have = {keyword.arg: constant(keyword.value) for keyword in loader.keywords}
    if "num_workers" in have and have["num_workers"] != 0:
        raise Refused("the DataLoader has workers; if they are too slow, give it more, or decode less in __getitem__")
    if b"IterableDataset" in source.data:
        raise Refused("each worker would go over the whole IterableDataset; divide it by get_worker_info() first")
    if len(loader.args) > 5:
        raise Refused(f"line {loader.lineno} passes num_workers by its position")
    wanted = {"num_workers": str(WORKERS)}
    if not _is_touched(source, loader):
        wanted["persistent_workers"] = "True"
    if "pin_memory" not in have:
        wanted["pin_memory"] = "True"
    return with_keywords(source, loader, **wanted)


def _is_touched(source: SourceText, loader: ast.Call) -> bool:
    """Whether the file does anything with the dataset by itself, such as setting its epoch: workers that stay do not see it."""
    dataset = name_of(loader.args[0]) if loader.args else ""
    return bool(dataset) and any(
        isinstance(node, ast.Attribute) and name_of(node.value) == dataset for node in ast.walk(source.tree)
    )


PATCH = Patch("loader", frozenset({"data"}), "workers prepare the batches ahead", propose)
