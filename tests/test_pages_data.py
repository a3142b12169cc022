"""Data inside a page: read back as it was, and never markup."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from gpubound.pages import data

INNER = st.none() | st.text() | st.integers()
VALUES = st.recursive(INNER, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(VALUES)
def test_it_is_read_back_and_cannot_end_its_script(value):
    text = str(data([value, "</script><!--&"]))
    assert not set(text) & set("<>&") and json.loads(text) == [value, "</script><!--&"]


def test_what_json_cannot_say_is_refused():
    with pytest.raises(ValueError):
        data(float("nan"))
