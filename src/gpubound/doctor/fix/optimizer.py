"""Let the optimizer update all parameters in one kernel."""

from .patch import Patch
from .source import Edit, Refused, SourceText, last_name, with_keywords

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


def propose(source: SourceText, line: int) -> list[Edit]:
    made = [call for call in source.calls() if last_name(call) in FUSED]
    here = [call for call in source.calls(line) if call in made]
    found = here or made
    if len(found) != 1:
        raise Refused(f"{len(found) or 'none'} of {', '.join(FUSED)} is made in this file, wanted one")
    (call,) = found
    have = {keyword.arg: keyword for keyword in call.keywords}
    if (old := have.get("foreach")) is None:
        return with_keywords(source, call, fused="True")
    if "fused" in have:
        raise Refused(f"line {call.lineno} passes both foreach and fused; leave foreach out and set fused=True")
    at = source.start(old.value) - len("foreach=")
    if source.data[at : source.start(old.value)] != b"foreach=":
        raise Refused(f"line {call.lineno} writes foreach in an unusual way; set fused=True there")
    return [Edit(at, source.end(old.value), "fused=True")]


PATCH = Patch("optimizer", frozenset({"optimizer"}), "one kernel updates all parameters", propose, equal=False)
