"""Read YAML files strictly, and command lines with the names of other trainers."""

from collections.abc import Collection, Sequence
from typing import Any

import yaml

from ..formatting import shown
from ..train.aliases import advice, is_alias, normal

MAX_BYTES = 1 << 20  # of a config file
MAX_DEPTH, MAX_VALUES = 32, 100_000  # levels, and values with every alias expanded


class StrictLoader(yaml.SafeLoader):
    """Load YAML, and refuse values that PyYAML silently reads differently: the last of two equal keys, 1:30 as 90, 010 as 8."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines = dict[tuple[str, str], int]()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and (first := lines.setdefault((key.tag, key.value), line)) != line:
                raise ValueError(f"{shown(key.value)} is there twice, in lines {first} and {line}; leave one of them out")
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int | float:
        integer = node.tag == "tag:yaml.org,2002:int"
        value = self.construct_yaml_int(node) if integer else self.construct_yaml_float(node)
        digits = node.value.replace("_", "").lstrip("+-")
        if ":" in digits or (integer and digits.isdecimal() and int(digits) != abs(value)):
            base = "sixties" if ":" in digits else "eights"
            raise ValueError(
                f"{shown(node.value)} in line {node.start_mark.line + 1} is {value} in YAML, counted in {base}; write the "
                f"number in tens, or a text in quotes"
            )
        return value


for _tag in ("int", "float"):
    StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", StrictLoader.construct_number)


def load_yaml(text: str) -> Any:
    """Return the value that `text` holds. ValueError if it contains itself, is too deep, or grows too large by its aliases."""
    loader = StrictLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}, 0) > MAX_VALUES:
            raise ValueError(f"with every alias (*name) expanded it holds more than {MAX_VALUES:,} values; leave aliases out")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, sizes: dict[int, int | None], depth: int) -> int:
    """Return the number of values in `node`, with every alias expanded."""
    if id(node) in sizes:
        if (size := sizes[id(node)]) is None:
            raise ValueError(f"line {node.start_mark.line + 1} holds a value that contains itself; write it without the alias")
        return size
    if depth > MAX_DEPTH:
        raise ValueError(f"line {node.start_mark.line + 1} is nested more than {MAX_DEPTH} deep; write fewer levels")
    sizes[id(node)], size = None, 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_size(item, sizes, depth + 1) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        size += sum(_size(item, sizes, depth + 1) for pair in node.value for item in pair)
    sizes[id(node)] = size
    return size


def split_aliases(argv: Sequence[str], known: Collection[str]) -> tuple[list[str], dict[str, Any]]:
    """Return (the arguments without options of other trainers, the values of those). An option without a value is true."""
    ours, theirs, name = list[str](), dict[str, list[Any]](), None
    for word in argv:
        if word.startswith("--"):
            option, equals, text = word.partition("=")
            name, key = None, normal(option[2:])
            if is_alias(key, known):
                theirs.setdefault(name := key, []).extend([text] if equals else [])
                continue
            if not {key, key.removeprefix("no_")} & {*known, "help", "from", "print"} and "?" in (meant := advice(key, known)):
                meant = meant.replace("mean '", "mean '--")
                raise ValueError(f"there is no option {option}; {meant} See gpubound train --help.")
        (ours if name is None else theirs[name]).append(word)
    values = {}
    for name, words in theirs.items():
        try:
            read = [load_yaml(word) for word in words]
        except (ValueError, yaml.YAMLError):
            read = words
        values[name] = True if not read else read[0] if len(read) == 1 else read
    return ours, values
