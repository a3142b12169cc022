"""Several ranks look at themselves, and the first reports for all."""

import json
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest

from gpubound.cli import main
from gpubound.cli.doctor import Doctor
from gpubound.cli.doctor_actions import check_fix
from gpubound.doctor.finding import Finding, Verdict
from gpubound.doctor.report.words import merged, screen
from gpubound.watch.events import Site
from gpubound.watch.pretend import simgpu
from tests.messages import message, refusal

from ..distributed.processes import on_ranks

SCRIPT = """\
import os, sys, torch
device = torch.accelerator.current_accelerator()
weight = torch.nn.Parameter(torch.ones(3, device=device))
optimizer = torch.optim.SGD([weight], lr=0.1)
rank = int(os.environ["RANK"])
for step in range(50):
    loss = weight.sum()
    loss.backward()
    optimizer.step()
    for _ in range(1 + rank):
        loss.item()
    if rank == 1:
        print(loss)
    if rank == 2:
        sys.exit("no data")
"""


def looked(folder: str, *options: str) -> tuple[int, str, str]:
    """In a rank of its own."""
    os.chdir(folder)
    simgpu()
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["doctor", "--dry-run", *options, "train.py"])
    return code, out.getvalue(), err.getvalue()


@pytest.mark.slow
def test_the_first_of_three_reports_for_all(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (code, said, _), second, (failed, _, why) = on_ranks(3, looked, str(tmp_path), "--json")
    verdict = json.loads(said)
    assert code == 0 and second[:2] == (0, "") and failed == 2 and "train.py failed with code 1" in why
    assert [(f["line"], f["count"], f["evidence"].rpartition("; ")[2]) for f in verdict["findings"]] == [
        (11, 2, "on 2 of 3 ranks, 1 to 2 a step"),
        (13, 1, "on rank 1 of 3 alone"),
    ]
    assert verdict["counts"]["syncs"] == 3, "the rank that waits most"
    assert verdict["absent"]["rank 2"].startswith("train.py failed with code 1") and len(verdict["ranks"]) == 2


def test_a_proof_is_for_one_machine(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert refusal(ValueError, lambda: check_fix(Doctor(fix=True, prove=3))) == message("doctor/ranks:a_proof_is_for_one_machi")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_fix(Doctor(fix=True, prove=3))


def verdict(comm: float, ms: float) -> Verdict:
    """Of a step of 40 ms, `comm` per cent of it alone in communication, with an item of `ms`."""
    item = Finding("sync", Site("train.py", 8, "step", "loss.item()", 8), None, "", None, 1, ms, "replayed", "waits", "do not")
    shares = {"busy": 100 - comm, "host_late": 0.0, "device_side": 0.0, "comm": comm, "unlocated": 0.0}
    return Verdict(
        "train.py", {"device": "a GPU"}, 40.0, {"shares": shares, "late": {}}, 38.0, [item], ms, [], [], {}, {}, None
    )


def test_the_rank_that_the_others_wait_for_is_named():
    """Ranks 0 to 2 compute 30 ms of 40, rank 3 all 40 but 0.4: it is 9.6 ms late, and has the dearest item."""
    every = {rank: verdict(25.0, 1.0 + rank) for rank in range(3)} | {3: verdict(1.0, 6.0)}
    found = merged(every, {})
    assert [(f.kind, round(f.ms, 3)) for f in found.findings] == [("comm", 9.6), ("sync", 6.0)]
    said = "rank 3 comes late: without communication its step takes 39.6 ms, another's 30.0 ms"
    assert found.findings[0].evidence == said
    assert found.findings[1].evidence == message("doctor/ranks:the_rank_that_the_others") and found.together_ms == 6.0
    assert message("doctor/ranks:the_rank_that_the_others.2").within(screen(found, 200))
    assert [f.kind for f in merged({rank: verdict(25.0 - rank, 1.0) for rank in range(4)}, {}).findings] == ["sync"]


def test_what_costs_nothing_on_the_first_rank_may_be_dear_on_another():
    cheap = verdict(5.0, 0.0)
    cheap = replace(cheap, findings=[], harmless=cheap.findings)
    found = merged({0: cheap, 1: verdict(5.0, 4.0)}, {})
    assert not found.harmless and [f.evidence for f in found.findings] == [message("doctor/ranks:what_costs_nothing_on_th")]
    assert Verdict.from_dict(json.loads(json.dumps(found.as_dict()))).ranks[1]["step_ms"] == 40.0
