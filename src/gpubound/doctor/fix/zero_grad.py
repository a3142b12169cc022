"""Let backward make the gradients anew, instead of zeroing them and adding to them."""

import ast

from .patch import Patch
from .source import Edit, Refused, SourceText, constant, last_name


def propose(source: SourceText, line: int) -> list[Edit]:
    found = [call for call in source.calls(line) if last_name(call) == "zero_grad"]
    for call in found:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if len(values) == 1 and constant(values[0]) is False:
            assert isinstance(call.func, ast.Attribute)
            return [Edit(source.end(call.func), source.end(call), "()")]
    raise Refused("no zero_grad(set_to_none=False) is written in this line")


PATCH = Patch("zero_grad", frozenset({"optimizer", "zero_grad"}), "gradients are made anew", propose)
