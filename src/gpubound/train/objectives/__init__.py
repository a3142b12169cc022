"""Training objectives, a file each, and the registry of their names: `objective:` of a recipe, `loss=` of a TrainStep."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from .causal_lm import CausalLM, NextToken
from .objective import Objective

OBJECTIVES: dict[str, type[Objective]] = {
    "causal_lm": CausalLM,
    "next_token": NextToken,
}


def objective_named(name: str, options: Mapping[str, Any]) -> Objective:
    """The objective of a run on a Corpus, with its options."""
    kind = OBJECTIVES.get(name)
    if kind is None or not kind.of_corpus:
        there = ", ".join(name for name, kind in OBJECTIVES.items() if kind.of_corpus)
        raise ValueError(f"recipe: objective: got {name!r}, wanted one of {there}.")
    known = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its options are {', '.join(known) or 'none'}."
            raise ValueError(f"recipe: objective_options: {key!r} is no option of {name}; {hint}")
    return kind(**options)
