"""Copies of a script's own host data, an index that is copied many times, and the validation of distributions."""

import runpy

import pytest

from gpubound.doctor.fix.repair import Target, repair
from gpubound.watch import watch

from .test_fix import mended

ROLLOUT = """\
import numpy as np
import torch
from torch.distributions import Categorical

device = torch.accelerator.current_accelerator()
torch.manual_seed(0)
a, b, state, kept = torch.arange(6.0).to(device), torch.ones(6).to(device), np.ones(3, np.float32), []
logits, found = torch.zeros(3, device=device), []
for step in range(4):
    x, y = torch.Tensor(state).to(device), torch.as_tensor(state * 2, device=device)  # two
    order = np.array([step, 0])
    picked = a[order] + b[order]  # first
    more = a.square()[order]  # second
    dist = Categorical(logits=logits)  # checked
    kept += [(picked.sum() + more.sum() + x.sum() * y.sum()).item()]  # kept
total = sum(kept)
"""


def reads_and_copies(path, device) -> tuple[int, int, float]:
    with watch(device=device) as ledger:
        total = runpy.run_path(str(path))["total"]
    loop = [
        row
        for row in ledger.rows
        if row.place.site and row.place.site.code.startswith(("x, y", "picked", "more", "dist", "kept +="))
    ]
    blocking = sum(row.count for row in loop if row.kind == "sync")
    return blocking, sum(row.count for row in ledger.rows if row.kind == "h2d"), total


def test_a_rollout_waits_no_more_and_computes_the_same(tmp_path, sim, monkeypatch):
    """Copies go through pinned memory, an index is copied once, what is read is read after the loop."""
    from torch.distributions import Distribution

    monkeypatch.setattr(Distribution, "_validate_args", True)
    path = tmp_path / "train.py"
    path.write_text(ROLLOUT)
    line = {word: n for n, text in enumerate(ROLLOUT.splitlines(), 1) for word in [text.rpartition("# ")[2]]}
    found = [
        Target("h2d", str(path), line["two"]),
        Target("h2d", str(path), line["first"], lines=(line["first"], line["second"])),
        Target("sync", str(path), line["checked"], via="/venv/torch/distributions/distribution.py"),
        Target("sync", str(path), line["kept"]),
    ]
    before = reads_and_copies(path, sim)
    made = repair(found)
    assert not made.refused and made.equal, made
    made.apply()
    monkeypatch.setattr(Distribution, "_validate_args", True)
    after = reads_and_copies(path, sim)
    text = path.read_text()
    assert before[2] == after[2] and before[0] == 4 * (2 + 3 + 1 + 1)
    assert after[0] == 0, "the one copy of the index has a line of its own"
    assert text.count("as_tensor(order, device=a.device)") == 1 and text.count("[order_on_device]") == 3
    again = repair([Target("h2d", str(path), next(n for n, t in enumerate(text.splitlines(), 1) if "# two" in t))])
    assert not again.changes and again.refused


@pytest.mark.parametrize(
    ("old", "new", "kind", "word", "why"),
    [
        ("import torch\n", "import torch\npinned = 1\n", "h2d", "# two", "the name pinned is taken"),
        ("torch.Tensor(state).to(device)", 'torch.Tensor(state).to("cpu")', "h2d", "# two", "may copy to the host"),
        ("a[order] + b[order]", "a[order] + b[step]", "h2d", "# first", "by several"),
        ("a[order] + b[order]", "a.exp()[order]", "h2d", "# first", "has no name"),
        ("a[order] + b[order]", "order_on_device = a[order]", "h2d", "# first", "order_on_device is taken"),
        ("import torch\n", "import torch\n", "h2d", "# first", "makes no tensor of host data"),
    ],
)
def test_what_is_refused(tmp_path, old, new, kind, word, why):
    text = ROLLOUT.replace(old, new)
    if why == "makes no tensor of host data":
        text = text.replace("a[order] + b[order]", "a[step:]")
    _, made = mended(tmp_path, text, (kind, word))
    assert why in str(made), made


def test_validation_that_the_file_chooses_itself_is_left(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(ROLLOUT.replace("Categorical(logits=logits)", "Categorical(logits=logits, validate_args=True)"))
    made = repair([Target("sync", str(path), 14, via="/venv/torch/distributions/distribution.py")])
    assert "chooses itself" in str(made) and not made.changes


@pytest.mark.parametrize("made", ["torch.cat(images)", "images[0] / 255", "(images[0] == images[1]).float()"])
def test_what_a_line_makes_of_batches_is_pinned_there(tmp_path, made):
    """A loader's pinned memory is none of its result, also if an earlier or a later value of that name is a batch."""
    before = (
        "import torch\nloader = DataLoader(data, pin_memory=True)\nfor images in loader:\n"
        f"    images = {made}\n    images = images.float()\n    images = images.to(device)  # here\n    images = images[0]\n"
    )
    text, _ = mended(tmp_path, before, ("h2d", "# here"))
    assert "images = pinned(images).to(device, non_blocking=True)  # here" in text
    plain, _ = mended(tmp_path, before.replace(made, "images[0]"), ("h2d", "# here"))
    assert "    images = images.to(device, non_blocking=True)  # here" in plain


def test_a_variable_of_older_scripts_is_a_tensor(tmp_path):
    before = "import torch\nfor step in range(9):\n    x = Variable(torch.LongTensor(rows))\n    x = x.cuda()  # here\n"
    text, _ = mended(tmp_path, before, ("h2d", "# here"))
    assert "x = pinned(x).cuda(non_blocking=True)  # here" in text
