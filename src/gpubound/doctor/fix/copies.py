"""Copy batches from pinned memory without waiting."""

import ast

from .loader import loader_at
from .patch import Patch
from .source import Edit, Refused, SourceText, constant, last_name, with_keywords

COPYING = ("to", "cuda")


def propose(source: SourceText, line: int) -> list[Edit]:
    """`non_blocking=True` for every copy in this line, and pinned memory from the loader, without which that is a lie."""
    copies = [call for call in source.calls(line) if isinstance(call.func, ast.Attribute) and last_name(call) in COPYING]
    if not copies:
        raise Refused("no .to() or .cuda() is written in this line")
    if any(constant(node) == "cpu" for call in copies for node in ast.walk(call)):
        raise Refused("it copies to the host, which must wait before it may read what arrives")
    if len({source.text(call.args[0]) for call in copies if call.args}) > 1:
        raise Refused("it copies to more than one place, of which one may be the host")
    try:
        loader = loader_at(source, line)
    except Refused as why:
        raise Refused(f"the batches must be pinned where they are made, and {why}") from None
    edits = with_keywords(source, loader, pin_memory="True")
    for call in copies:
        edits += with_keywords(source, call, non_blocking="True")
    return edits


PATCH = Patch("copies", frozenset({"h2d", "pageable"}), "batches are copied from pinned memory, and nobody waits", propose)
