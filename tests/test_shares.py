"""No share above 100 % is printed; sizes, numbers and durations in words."""

from types import SimpleNamespace

import pytest
import torch

from gpubound import measure, trace
from gpubound.cli.session import MatrixRate
from gpubound.decode.request import Generated, Generation
from gpubound.distributed import ALONE
from gpubound.formatting import duration, hint, nearest, quantity, readable, suggest_keywords
from gpubound.generate.batches import Speed
from gpubound.train.records import TokenFlops
from tests.messages import message


@pytest.fixture
def limits(monkeypatch):
    """The limit that was kept, and the one that measuring again finds."""
    found = SimpleNamespace(kept=1e9, again=1e9, asked=[])

    def share(achieved, figure, device):
        found.asked.append((achieved, figure, device))
        found.kept = found.again
        return achieved / found.kept if achieved <= found.kept else None

    monkeypatch.setattr(measure, "ceilings", lambda device, quick: SimpleNamespace(read_bytes_per_s=found.kept))
    monkeypatch.setattr(measure, "share", share)
    return found


def speed(bytes_read: int) -> Speed:
    made = Speed(torch.device("cpu"))
    made.add(Generation([Generated([1], [2] * 10)], 2.0, 0.5, launches=5, steps=10, row_steps=10, bytes_read=bytes_read))
    return made


def test_a_roofline_that_is_passed_is_measured_again(limits):
    limits.again = 4e9
    generation = speed(4_000_000_000)  # in two seconds
    assert message("shares:a_roofline_that_is_passe").within(generation.line())
    assert limits.asked == [(2e9, "read_bytes_per_s", torch.device("cpu"))]
    assert generation.as_dict()["roofline"] == 0.5 and generation.as_dict()["read_bytes_per_s"] == 4e9


def test_a_model_that_no_roofline_holds(limits):
    generation = speed(4_000_000_000)
    assert message("shares:a_model_that_no_roofline").within(generation.line())
    assert generation.as_dict()["roofline"] is None


def test_within_the_roofline_nothing_is_measured(limits):
    assert message("shares:within_the_roofline_noth").within(speed(1_000_000_000).line()) and limits.asked == []


def test_a_matrix_rate_that_is_passed_ends_the_shares_of_a_run(limits, capsys, monkeypatch):
    """Its head names the rate, so the one that is measured now is for the next run."""
    monkeypatch.setattr(trace, "_printed", set())
    scale = MatrixRate.__new__(MatrixRate)
    scale.work = TokenFlops([(6, 1_000_000, "parameters in products")], [], 1)
    scale.run, scale.attended, scale.tokens = SimpleNamespace(ranks=ALONE, phase=0, device=torch.device("cpu")), [8], [100]
    scale.figure, scale.flops_per_s = "fp32_flops_per_s", 1e9
    assert scale.fill({"tokens_per_s": 30.0, "seconds": 1.0})["mfu"] == 0.6, "all tokens are computed, 30 of 100 are learnt"
    assert "mfu" not in scale.fill({"tokens_per_s": 60.0, "seconds": 0.5})
    assert limits.asked == [(1.2e9, "fp32_flops_per_s", torch.device("cpu"))]
    assert "mfu" not in scale.fill({"tokens_per_s": 30.0, "seconds": 1.0}) and len(limits.asked) == 1
    assert message("shares:a_matrix_rate_that_is_pa").within(capsys.readouterr().err)


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
