"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """How to end a sentence that refuses `name`: '; did you mean syncs?' when a known name is close, else a full stop."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "."
