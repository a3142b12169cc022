"""What a ledger says: its table, its dict, and budgets by exact sentence."""

import json

import pytest
import torch

from gpubound.errors import BudgetError
from gpubound.watch import watch
from tests.messages import message, refusal

QUIET = ("gc", "compiles", "fallbacks", "triton", "calls", "dispatch", "kernels", "allocator", "gputrace")


def make(batch, sim):
    x = batch.to(sim)
    return x.sum().item()


def small_ledger(sim, monkeypatch, request):
    monkeypatch.chdir(request.path.parent)
    batch = torch.ones(512)
    with watch(without=QUIET) as ledger:
        for _ in range(2):
            make(batch, sim)
            ledger.step()
    return ledger


def test_the_table(sim, monkeypatch, request):
    first = make.__code__.co_firstlineno
    one, two = (f"test_ledger_words.py:{first + n} in make" for n in (1, 2))
    where = "where".ljust(len(one))
    assert str(small_ledger(sim, monkeypatch, request)) == message("watch/ledger_words:the_table", where, one, two)


def test_as_dict_goes_into_json(sim, monkeypatch, request):
    got = json.loads(json.dumps(small_ledger(sim, monkeypatch, request).as_dict()))
    assert got["version"] == 1 and got["steps"] == 2
    assert got["totals"]["h2d_bytes"] == 4096 and got["per_step"]["syncs"] == 2.0
    assert list(got["sensors"]) == ["simgpu"] and got["absent"]["gc"] == "left out"
    assert got["rows"][1] == {
        "kind": "sync",
        "what": "item",
        "detail": "",
        "count": 2,
        "bytes": 0,
        "ms": 0.0,
        "site": {
            "file": __file__,
            "line": make.__code__.co_firstlineno + 2,
            "function": "make",
            "code": "return x.sum().item()",
        },
        "via": "",
        "node": "",
        "built": None,
        "thread": "",
    }


def test_over_budget_shows_the_lines(sim, monkeypatch, request):
    ledger = small_ledger(sim, monkeypatch, request)
    ledger.assert_within(syncs=4, h2d_bytes=4096)
    with pytest.raises(BudgetError) as error:
        ledger.assert_within(syncs=3, d2h_bytes=0, repeated_uploads=0)
    first = make.__code__.co_firstlineno
    one, two = f"test_ledger_words.py:{first + 1} in make", f"test_ledger_words.py:{first + 2} in make"
    assert str(error.value).splitlines() == [
        message("watch/ledger_words:over_budget_shows_the_li"),
        message("watch/ledger_words:over_budget_shows_the_li.2", "where".ljust(len(one))),
        message("watch/ledger_words:over_budget_shows_the_li.3", one),
        message("watch/ledger_words:over_budget_shows_the_li.4", two),
        message("watch/ledger_words:over_budget_shows_the_li.5", one),
    ]
    assert isinstance(error.value, AssertionError)


def test_what_nobody_counted_cannot_pass(sim, monkeypatch, request):
    ledger = small_ledger(sim, monkeypatch, request)
    with pytest.raises(BudgetError) as error:
        ledger.assert_within(allocations=0)
    assert str(error.value) == message("watch/ledger_words:what_nobody_counted_cann")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: watch().assert_within(sync=0), message("watch/ledger_words:wrong_limit")),
        (lambda: watch().assert_within(syncs=-1), message("watch/ledger_words:wrong_number")),
        (lambda: watch(device="cpu"), message("watch/ledger_words:wrong_device")),
        (lambda: watch(device="gpu"), message("watch/ledger_words:no_device")),
        (lambda: watch(without="gputraces"), message("watch/ledger_words:wrong_sensor")),
        (lambda: watch(without=3), message("watch/ledger_words:no_sensor")),
        (lambda: watch(launches="all"), message("watch/ledger_words:wrong_launches")),
        (lambda: watch(gputrace="on"), message("watch/ledger_words:wrong_gputrace")),
    ],
)
def test_bad_arguments(call, text):
    assert refusal(ValueError, lambda: call()) == text


def test_no_limits():
    with pytest.raises(ValueError, check=message("watch/ledger_words:no_limits")):
        watch().assert_within()


def test_a_ledger_that_was_never_opened_has_counted_nothing():
    with pytest.raises(BudgetError, check=message("watch/ledger_words:a_ledger_that_was_never")):
        watch().assert_within(syncs=0)


def test_a_ledger_is_used_once():
    ledger = watch()
    with ledger:
        pass
    with pytest.raises(ValueError) as error, ledger:
        pass
    assert str(error.value) == message("watch/ledger_words:a_ledger_is_used_once")
