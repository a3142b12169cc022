"""The gate: budgets, baseline, what is allowed, and exit codes; never green because something is missing."""

import json
import linecache
from dataclasses import replace

import pytest

from gpubound.doctor.finding import Finding, Verdict
from gpubound.doctor.gate import Allowance, Budgets, gate, read_allowances, read_baseline
from gpubound.errors import DataError
from gpubound.watch.events import Site
from tests.messages import message

ITEM = Finding("sync", Site("train.py", 88, "step", "if loss.item() > best:", 88), None, "", None, 2, 1.0, "replayed", "", "")
SHARES = {"busy": 80.0, "host_late": 15.0, "device_side": 3.0, "comm": 1.0, "unlocated": 1.0}
GOOD = Verdict(
    "train.py", {"device": "H200"}, 10.0, {"shares": SHARES, "late": {}}, 8.0, [ITEM], 1.0, [], [], {}, {}, 1.2,
    {"syncs": 3.0, "pageable_bytes": 2e6},
)  # fmt: skip
DRY = replace(GOOD, step_ms=None, bar={}, absent={"prices": "no tape was recorded"})
BLIND = replace(DRY, counts={})


@pytest.mark.parametrize(
    "option, exactly", [("syncs_per_step", 3), ("idle_pct", 19), ("host_late_ms", 1.5), ("pageable_mb", 2)]
)
def test_a_budget_passes_at_its_limit_fails_below_it_and_wants_a_measurement(option, exactly):
    assert gate(GOOD, Budgets(**{f"max_{option}": exactly})).code == 0
    failed = gate(GOOD, Budgets(**{f"max_{option}": exactly * 0.99}))
    assert failed.code == 1 and f"--max-{option.replace('_', '-')}" in failed.lines()[0]
    blind = gate(BLIND, Budgets(**{f"max_{option}": 1e9}))
    assert blind.code == 3 and "no tape was recorded" in blind.lines()[0]


def test_counts_are_budgeted_without_a_gpu_and_a_failure_beats_what_is_missing():
    assert gate(DRY, Budgets(max_syncs_per_step=3)).code == 0
    assert gate(DRY, Budgets(max_syncs_per_step=3, max_idle_pct=50)).code == 3
    assert gate(DRY, Budgets(max_syncs_per_step=2, max_idle_pct=50)).code == 1
    assert gate(GOOD, Budgets()).code == 0


def test_a_baseline_holds_the_step_and_the_counts(tmp_path):
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps(GOOD.as_dict()))
    before = read_baseline(path)
    assert gate(replace(GOOD, step_ms=10.2), Budgets(), before).code == 0
    assert gate(replace(GOOD, step_ms=10.4), Budgets(), before).code == 1
    assert gate(replace(GOOD, step_ms=10.4), Budgets(max_regress_pct=5), before).code == 0
    assert gate(replace(GOOD, counts=GOOD.counts | {"syncs": 4.0}), Budgets(), before).code == 1
    assert gate(replace(GOOD, counts={}), Budgets(), before).code == 3
    assert gate(DRY, Budgets(), before).code == 3
    assert gate(DRY, Budgets(), DRY).code == 0
    for now in (DRY, GOOD):  # a limit for the step that the baseline has not
        passage = gate(now, Budgets(max_regress_pct=5), DRY)
        assert passage.code == 3 and message("doctor/gate:a_baseline_holds_the_ste").within(passage.lines()[0])
    assert gate(BLIND, Budgets(), BLIND).code == 3
    assert message("doctor/gate:a_baseline_holds_the_ste.2").within(
        gate(replace(GOOD, machine={"device": "H100"}), Budgets(), before).lines()[0]
    )
    for wrong, words in (("{", "is not JSON"), ("[]", "holds a JSON list"), ('{"version": 1}', "the verdict is damaged")):
        path.write_text(wrong)
        with pytest.raises(DataError, match=rf"doctor\.json: {words}"):
            read_baseline(path)


def test_what_is_allowed_is_taken_off_the_budgets():
    entry = Allowance("sync", "train.py", "if  loss.item() >  best:", "decides when to stop")
    budgets = Budgets(max_syncs_per_step=1, max_host_late_ms=0.5, max_idle_pct=9)
    assert gate(GOOD, budgets).code == 1
    assert gate(GOOD, budgets, allowances=[entry]).code == 0
    moved = replace(GOOD, findings=[replace(ITEM, site=replace(ITEM.site, line=99, end=99))])
    assert gate(moved, budgets, allowances=[entry]).code == 0
    for stale in (replace(entry, code="if loss > best:"), replace(entry, kind="h2d"), replace(entry, file="other.py")):
        passage = gate(GOOD, Budgets(), allowances=[stale])
        assert passage.code == 1 and "take the entry out" in passage.lines()[0]


def test_a_comment_on_any_line_of_the_statement_allows_it(tmp_path):
    script = tmp_path / "script.py"

    def judged(comment: str):
        script.write_text(f"if (\n    loss.item()  {comment}\n): pass\n")
        linecache.checkcache(str(script))
        found = replace(ITEM, site=Site(str(script), 1, "<module>", "if (", 3))
        return gate(replace(GOOD, findings=[found]), Budgets(max_syncs_per_step=1))

    assert judged("# gpubound: allow(sync) it decides when to stop").code == 0
    assert judged("# gpubound: allow(h2d) of another kind").code == 1
    assert message("doctor/gate:a_comment_on_any_line_of").within(judged("# gpubound: allow(sync)").lines()[0])
    assert "did you mean 'sync'?" in judged("# gpubound: allow(snyc) typo").lines()[0]


def test_an_allow_list_is_read_whole_or_not_at_all(tmp_path):
    path = tmp_path / "allow.toml"
    entry = '[[allow]]\nkind = "sync"\nfile = "train.py"\ncode = "x.item()"\n'
    path.write_text(entry + 'why = "once an epoch"\n')
    assert read_allowances(path) == [Allowance("sync", "train.py", "x.item()", "once an epoch")]
    for text, words in (
        (entry, "entry 1: wanted texts for kind, file, code and why"),
        (entry + 'why = " "', "entry 1: wanted texts"),
        (entry.replace("sync", "snyc") + 'why = "x"', "entry 1: kind: did you mean 'sync'?"),
        ("allow = 3", "got allow, wanted"),
        ("[alow]", "got alow, wanted"),
        ("kind", "is no TOML"),
    ):
        path.write_text(text)
        with pytest.raises(DataError) as error:
            read_allowances(path)
        assert words in str(error.value)


def test_wrong_budgets_are_refused():
    with pytest.raises(ValueError, check=message("doctor/gate:wrong_budgets_are_refuse")):
        Budgets(max_idle_pct=-1)
    for wrong in (True, float("nan"), "3"):
        with pytest.raises(ValueError, match=r"^--max-syncs-per-step: got"):
            Budgets(max_syncs_per_step=wrong)
    with pytest.raises(ValueError, check=message("doctor/gate:wrong_budgets_are_refuse.2")):
        gate(GOOD, Budgets(max_regress_pct=1))


@pytest.mark.parametrize("read", [read_baseline, read_allowances])
def test_a_file_that_is_not_there_is_a_sentence(read, tmp_path):
    with pytest.raises(DataError, check=message("doctor/gate:a_file_that_is_not_there")):
        read(tmp_path / "there.json")
