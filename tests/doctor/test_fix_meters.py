"""Meters that keep what they are given on the device, and autocast on request."""

import runpy

import pytest

from gpubound.watch import watch

from .test_fix import mended

METERED = """\
import torch


class Meter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.val, self.sum, self.count, self.avg = 0, 0, 0, 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    @property
    def half(self):
        return self.sum / 2


device = torch.accelerator.current_accelerator()
x = torch.arange(12.0, device=device)
losses, kept = Meter(), []
for step in range(12):
    loss = x[step] / 7
    losses.update(loss.item(), 3)  # here
    if step % 4 == 3:
        print(f"{losses.val:.6f}", losses.avg, "%.3f" % losses.sum)
    seen = x[:step].sum()  # no attribute of a meter
kept = [losses.avg, losses.half, losses.count]
"""


def test_a_meter_keeps_the_value_on_the_device_until_it_is_shown(tmp_path, sim, capsys):
    text, made = mended(tmp_path, METERED, ("sync", "# here"))
    assert not made.refused and made.equal, made
    results = {}
    for name, source in (("before", METERED), ("after", text)):
        (tmp_path / f"{name}.py").write_text(source)
        with watch(device=sim) as ledger:
            kept = runpy.run_path(str(tmp_path / f"{name}.py"))["kept"]
        reads = sum(row.count for row in ledger.rows if row.kind == "sync" and row.what == "item")
        results[name] = (reads, capsys.readouterr().out, kept)
    assert results["before"][1:] == results["after"][1:]
    assert results["before"][0] == 12 and results["after"][0] == 3 * 3 + 2
    assert not mended(tmp_path, text, ("sync", "# here"))[1].changes, "it is applied once"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("self.val = val", "self.val = max(val, 0)", "does more than compute with the value"),
        ("self.val = val", "if val > 0:\n            self.val = val", "does more than compute"),
        ("    if step % 4 == 3:\n        print", "    if True:\n        print(losses.avg)\n    print", "is used in every step"),
        ("losses, kept = Meter(), []", "losses, kept = make(), []", "is not made here of a class of this file"),
        ("    @property\n    def half", "    def half", "uses what is stored"),
        ("losses.update(loss.item(), 3)", "losses.add(loss.item(), 3)", "not patched"),
        ("losses.update(loss.item(), 3)", "losses.update(loss.item() / 2, 3)", "not patched"),
    ],
)
def test_another_meter_is_refused(tmp_path, old, new, why):
    assert old in METERED
    _, made = mended(tmp_path, METERED.replace(old, new), ("sync", "# here"))
    assert not made.changes and why in str(made), made


LOOP = """\
import torch
from torch.nn import functional
torch.manual_seed(0)
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.rand(4, 64)
    optimizer.zero_grad()
    guess = model(x)  # here

    loss = functional.mse_loss(
        guess, x.mean(1, keepdim=True)
    )
    loss.backward()
    optimizer.step()
"""


def test_autocast_around_forward_and_loss_on_request(tmp_path):
    text, made = mended(tmp_path, LOOP, ("precision", "# here"))
    assert text == LOOP and "bf16: " in str(made) and "tf32: " in str(made)
    text, made = mended(tmp_path, LOOP, ("precision", "# here"), asked=["bf16"])
    assert not made.equal and text.count("torch.autocast(") == 1
    (tmp_path / "after.py").write_text(text.replace('"cuda"', '"cpu"'))
    (tmp_path / "before.py").write_text(LOOP)
    before, after = (runpy.run_path(str(tmp_path / f"{name}.py"))["loss"].item() for name in ("before", "after"))
    assert after == pytest.approx(before, rel=0.05) and after != before, "the products were in bf16"
    assert mended(tmp_path, text, ("precision", "# here"), asked=["bf16"])[1].refused


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("mse_loss", "binary_cross_entropy", "is refused under autocast"),
        ("    loss.backward()", "    print(loss)\n    loss.backward()", "does not follow plain assignments"),
        ("loss.backward()", "step_of(loss)", "no backward()"),
        ("x.mean(1, keepdim=True)", '"""a\nb"""', "a text of several lines"),
    ],
)
def test_where_autocast_does_not_fit(tmp_path, old, new, why):
    _, made = mended(tmp_path, LOOP.replace(old, new), ("precision", "# here"), asked=["bf16"])
    assert not made.changes and why in str(made), made


LISTED = """\
import torch

device = torch.accelerator.current_accelerator()
x, out = torch.arange(12.0, device=device), []
losses, sums = [], []
for step in range(12):
    loss = x[step] / 7
    losses.append(loss.item())  # here
    sums.append(loss.sum().item())  # here, too
    if step % 4 == 3:
        recent = losses[-4:]
        for value in sums:
            out.append(value)
        print(sum(recent) / len(losses), max(losses), len(sums))
kept = [*losses, *sums, *out]
"""


def test_a_list_is_read_before_it_is_shown(tmp_path, sim, capsys):
    """What was appended until then is converted in place, in the steps that show it alone."""
    text, made = mended(tmp_path, LISTED, ("sync", "# here"), ("sync", "# here, too"))
    assert not made.refused and made.equal, made
    results = []
    for name, source in (("before", LISTED), ("after", text)):
        (tmp_path / f"{name}.py").write_text(source)
        results.append((runpy.run_path(str(tmp_path / f"{name}.py"))["kept"], capsys.readouterr().out))
    assert results[0] == results[1] and len(results[0][0]) == 12 + 12 + 4 + 8 + 12
    lines = [line for line in text.splitlines() if "[:] = " in line]
    assert len(lines) == 5 and lines.count("        losses[:] = [float(value) for value in losses]") == 2
