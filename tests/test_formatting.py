"""Sizes, numbers and durations in words: one formatter for each."""

import pytest

from gpubound.formatting import duration, hint, nearest, quantity, readable, suggest_keywords


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (4096, "4.1 kB"),
        (1_500_000, "1.5 MB"),
        (141e9, "141.0 GB"),
        (2.5e15, "2500.0 TB"),
    ],
)
def test_bytes(count, text):
    assert readable(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (-1500, "-1.5k"), (1.23e6, "1.23M"), (2e9, "2G"), (3e12, "3T")]
)
def test_quantities(value, text):
    assert quantity(value) == text and quantity(value, " tok/s") == f"{text} tok/s"


def test_durations():
    assert [duration(seconds) for seconds in (0.5, 59.94, 60, 3600, 7384)] == [
        "0.5 s",
        "59.9 s",
        "1 min 0 s",
        "1 h 0 min",
        "2 h 3 min",
    ]


def test_misspelt_names():
    assert nearest("sync", ("syncs", "launches")) == "; did you mean syncs?"
    assert nearest("xyz", ("syncs", "launches")) == "."


def test_a_refused_name_ends_with_what_there_is():
    known = ("steps", "lr")
    assert hint("stpes", known, "the keys are") == "did you mean 'steps'?"
    assert hint(7, known, "the keys are") == "the keys are steps, lr."
    assert hint("x", (), "its options are") == "its options are none."


def test_a_type_error_of_the_calls_own_code_stays():
    def length(of, **others):
        return len(of)

    assert suggest_keywords(length, "length")([1]) == 1
    for keywords in ({}, {"too": 1}):
        with pytest.raises(TypeError, match="has no len"):
            suggest_keywords(length, "length")(of=3, **keywords)
    with pytest.raises(TypeError, match="missing 1 required"):
        suggest_keywords(length, "length")()
