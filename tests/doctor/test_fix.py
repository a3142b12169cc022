"""Patches: what they write, what they refuse, and that a patched script computes the same losses with fewer waits."""

import runpy
from pathlib import Path

import pytest
import yaml

from gpubound.doctor.finding import Finding
from gpubound.doctor.fix.repair import PATCHES, Repair, Target, repair, targets
from gpubound.doctor.rules.remedies import ACTED, AT_ONCE
from gpubound.watch import watch
from gpubound.watch.events import Site
from tests.messages import message, refusal, same_texts


def mended(tmp_path, text: str, *found: tuple[str, str], asked=(), remedy="") -> tuple[str, Repair]:
    """The patched text, and the repair, for findings of a kind on the line that holds some words."""
    path = tmp_path / "train.py"
    path.write_bytes(text.encode())
    lines = [next(n for n, line in enumerate(text.split("\n"), 1) if words in line) for _, words in found]
    made = repair([Target(kind, str(path), line, remedy=remedy) for (kind, _), line in zip(found, lines)], asked)
    assert path.read_bytes() == text.encode()  # nothing is written yet
    return (made.changes[path][1].decode() if made.changes else text), made


SCRIPT = """\
# -*- coding: utf-8 -*-
\"\"\"Ein Skript mit Umlauten: äöü.\"\"\"
import torch   # the usual
from torch import nn

torch.manual_seed(0)
device = torch.accelerator.current_accelerator()
data = torch.utils.data.TensorDataset(torch.rand(32, 4), torch.rand(32, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4,  # vier
                                     )
model = nn.Linear(4, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total, seen, best = 0.0, 0, 9.9
total = 0.0; kept = []


def train():
    global kept
    losses, running = [], 0.0
    for step, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device, )
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        torch.simgpu.synchronize()
        running += loss.item() * len(x)
        losses.append(loss.item())
        if step == 3:
            print(f"{running / 4:.6f}", running)
    kept = [sum(losses), losses, running]


train()
"""
FOUND = (
    ("h2d", "x, y = x.to"),
    ("sync", "synchronize"),
    ("sync", "running += "),
    ("sync", "losses.append"),
    ("zero_grad", "zero_grad"),
)


def test_a_patched_script_computes_the_same_and_waits_less(tmp_path, sim, capsys, one_thread):
    _, made = mended(tmp_path, SCRIPT, *FOUND)
    assert not made.refused and made.equal and [patch.name for patch in made.patches.values()] == [
        "copies", "waits", "reads", "reads", "zero_grad",
    ]  # fmt: skip
    states, waits = [], []
    for _ in range(2):
        with watch() as ledger:
            states.append(runpy.run_path(str(tmp_path / "train.py"))["kept"])
        waits.append((ledger.totals["syncs"], ledger.totals["pageable_copies"], capsys.readouterr().out))
        made.apply() if len(states) == 1 else None
    assert states[0] == states[1] and all(type(value) is float for value in states[1][1])
    # before: in 8 steps two copies, a wait and two reads each; after: two numbers printed, eight losses and one sum
    assert waits[0] == (2 + 8 * 5, 2 + 16, waits[1][2]) and waits[1][:2] == (2 + 2 + 8 + 1, 2)


READS = """\
import torch
torch.manual_seed(0)
device = torch.accelerator.current_accelerator()
parts, total, mean, right, hits, name, flag, first = [], 0.0, 0.0, 0, 0.0, 0, False, []
{loop}
print(parts, total, mean, right, hits, name, flag, first)
"""
KEPT_READS = {
    "a mean of comparisons": "mean += (a == b).float().mean().item()",
    "a share of comparisons": "mean += (a == b).sum().item() / len(a)",
    "a count from 0": "right += (a == b).sum().item()",
    "a count from 0.0": "hits += torch.sum(a == b).item()",
    "a count by a name": "same = a == b; right += (same & (a > 1)).sum().item()",
    "an index": "name = a.float().argmax().item()",
    "a truth": "flag = (a == b).any().item()",
    "whole numbers in a list": "parts.append((a == b).sum().item())",
    "a product in brackets": "total += (a.float().mean() * 0.3).item()",
    "a value on a condition": "total = torch.where(a > 1, a, 0.5).mean().item()",
}


@pytest.mark.parametrize("what", KEPT_READS)
def test_a_value_that_stays_on_the_device_is_the_number_it_was(tmp_path, sim, capsys, what):
    """Also its type: 3 does not become 3.0, nor True 1."""
    body = f"for step in range(5):\n    a, b = (torch.randint(3, (7,)).to(device) for _ in range(2))\n    {KEPT_READS[what]}"
    after, made = mended(tmp_path, READS.format(loop=body), ("sync", ".item()"))
    assert made.patches and ".item()" not in after, made.refused
    runpy.run_path(str(tmp_path / "train.py"))
    made.apply()
    with watch() as ledger:
        runpy.run_path(str(tmp_path / "train.py"))
    assert not [row for row in ledger.rows if row.kind == "clone"]  # a patch leaves no finding of its own
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_every_other_byte_stays(tmp_path):
    """The changed lines, one by one; comments, umlauts, double blanks and trailing commas are as before."""
    text, _ = mended(tmp_path, SCRIPT, *FOUND)
    before, after = SCRIPT.splitlines(), text.splitlines()
    changed = [line for line in before if line not in after] + [line for line in after if line not in before]
    same_texts("doctor/fix:every_other_byte_stays", changed)
    assert len(changed) == 16


SCRIPTS = yaml.safe_load(Path(__file__).with_name("patches.yaml").read_text(encoding="utf-8"))
PATCHED, OPTIONS, REFUSED = SCRIPTS["patched"], SCRIPTS["options"], SCRIPTS["refused"]


@pytest.mark.parametrize("name", PATCHED)
def test_a_patch(name, tmp_path):
    kind, before, after = PATCHED[name].values()
    text, made = mended(tmp_path, before, (kind, "# here"))
    assert text == after, made.refused


@pytest.mark.parametrize("why", REFUSED)
def test_a_refusal(why, tmp_path):
    kind, before = REFUSED[why].values()
    text, made = mended(tmp_path, before, (kind, "# here"))
    (reason,) = made.refused.values()
    assert why in reason and text == before and not made.changes


@pytest.mark.parametrize(
    ("line", "remedy", "why"),
    [
        ("obs = envs.step(action.cpu().numpy())", ACTED, ACTED),
        ("scaler.step(optimizer)", "train in bf16", "by hand: train in bf16"),
        ("x = a[numbers]", AT_ONCE, "elements: no comprehension or loop of the line"),
    ],
)
def test_a_refusal_says_what_to_do_by_hand(tmp_path, line, remedy, why):
    _, made = mended(tmp_path, f"import torch\nfor step in range(9):\n    {line}  # here\n", ("sync", "# here"), remedy=remedy)
    (reason,) = made.refused.values()
    assert why in reason


def test_tf32_is_taken_when_it_is_asked_for(tmp_path):
    text, made = mended(tmp_path, "import torch  # t\nf()  # here\n", ("precision", "# here"), asked=["tf32"])
    assert text == message("doctor/fix:tf32_is_taken_when_it_is") and not made.equal
    assert refusal(ValueError, lambda: repair([], asked=["tf23"])) == message("doctor/fix:tf32_is_taken_when_it_is.2")


def test_findings_of_one_line_go_together(tmp_path):
    """A line that is taken out answers all that was found there, and lines below it are still the right ones."""
    before = "if x:\n    y()\n    torch.cuda.empty_cache()\n    torch.cuda.synchronize()\n    o.zero_grad(False)\n"
    found = [("free", "empty"), ("sync", "empty"), ("sync", "cuda.sync"), ("zero_grad", "zero")]
    text, made = mended(tmp_path, before, *found)
    assert text == message("doctor/fix:findings_of_one_line_go") and len(made.patches) == 4
    said = str(made).replace(f"{tmp_path.name}/", "").splitlines()
    assert said[0] == message("doctor/fix:findings_of_one_line_go.2")
    assert said[-1] == message("doctor/fix:findings_of_one_line_go.3")


def test_every_patch_is_tried_here():
    """But for those of test_fix_step.py and test_fix_batches.py."""
    tried = {case["kind"] for case in (*PATCHED.values(), *REFUSED.values())} | {"launch_bound", "cpu_op", "repeat"}
    assert all(patch.kinds & tried for patch in PATCHES.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_a_loader_s_options_are_found_in_dictionaries(tmp_path, name):
    text, wanted = OPTIONS[name].values()
    after, made = mended(tmp_path, text, ("data", "# here"))
    assert not made.refused and wanted in after, after


def test_a_copy_of_memory_that_was_seen_pinned_needs_no_loader(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("def step(x, y):\n    x, y = x.to(device), y.to(device)\n")
    (target,) = targets([found(path, "201.2 kB a step (pinned, blocking)")])
    made = repair([target])
    assert (
        made.changes[path][1]
        == b"def step(x, y):\n    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)\n"
    )
    assert made.equal and repair(targets([found(path, "201.2 kB a step (pageable, blocking)")])).refused


def found(path, evidence: str) -> Finding:
    line = Site(str(path), 2, "step", "x, y = x.to(device), y.to(device)", 2)
    return Finding("h2d", line, None, "", None, 2.0, 1.0, "replayed", evidence, "")


SHOWN = "for step, x in enumerate(data):\n    print('loss',\n          model(x).item())  # here\n    f(x)\n"


def test_what_is_printed_in_every_step_is_printed_rarely_on_request(tmp_path):
    text, made = mended(tmp_path, SHOWN, ("sync", "# here"))
    assert text == SHOWN and "rarely" in next(iter(made.refused.values()))
    text, made = mended(tmp_path, SHOWN, ("sync", "# here"), asked=["rarely"])
    assert made.equal and "    if step % 50 == 0:\n        print('loss',\n              model(x).item())  # here\n" in text
    text, _ = mended(
        tmp_path,
        SHOWN.replace("enumerate(data)", "tqdm.tqdm(enumerate(data), leave=False)"),
        ("sync", "# here"),
        asked=["rarely"],
    )
    assert "if step % 50 == 0:" in text
    others = (SHOWN.replace("enumerate(data)", "pairs"), SHOWN.replace("step, x in enumerate(data)", "x in data"))
    for other in (*others, SHOWN.replace("    print", "    if step % 9 == 0: print"), "print(x.item())  # here\n"):
        assert mended(tmp_path, other, ("sync", "# here"), asked=["rarely"])[1].refused
