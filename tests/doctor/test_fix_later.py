"""Files that are written in another thread: which lines are taken, what is written, and what an error does."""

import runpy
import threading

import pytest
import torch

from gpubound.doctor.fix.calls import HELPER, WRITE_LATER as NAME
from gpubound.doctor.rules.remedies import AT_ONCE, STAYING
from gpubound.watch import watch

from .proofs import patched
from .test_fix import mended

SAVED = """\
import torch
from torchvision.utils import save_image

net.load_state_dict(torch.load("begin.pt"))
for epoch in range(3):
    for i, x in enumerate(data):
        step(x)
        if i % 100 == 0:
            save_image(x.detach(),  # here
                       "x.png", normalize=True)
    torch.save(net.state_dict(), "net%d.pt" % epoch)  # there
    torch.save(other.state_dict(), f"{epoch}.pt")
"""


def test_files_are_written_by_another_thread(tmp_path):
    """All of a block, and once for two findings of a line."""
    text, made = mended(tmp_path, SAVED, ("host_work", "# here"), ("d2h", "# here"), ("checkpoint", "# there"))
    assert {patch.name for patch in made.patches.values()} == {"later"} and len(made.patches) == 3 and made.equal
    wanted = SAVED
    for before, after in (
        ("utils import save_image\n", f"utils import save_image\n\n{HELPER}\n"),
        ("save_image(x.detach(),  # here", "write_later(save_image, x.detach(),  # here"),
        ('torch.save(net.state_dict(), "net%d', 'write_later(torch.save, net.state_dict(), "net%d'),
        ("torch.save(other", "write_later(torch.save, other"),
    ):
        assert SAVED.count(before) == 1
        wanted = wanted.replace(before, after)
    assert text == wanted


def test_a_function_s_file_is_written_by_another_thread(tmp_path):
    text = "import torch\n\ndef same(x):\n    copy = x + 1\n    return copy\n\n"
    text += "def save(folder, n):\n    open('log', 'w').write('')\n"
    text += "    torch.save(net.state_dict(), str(folder / f'{n}.pt'))  # here\n"
    after, made = mended(tmp_path, text, ("checkpoint", "# here"))
    assert "    write_later(torch.save, net.state_dict(), str(folder" in after, made.refused
    _, made = mended(tmp_path, text.replace("'w'", "'r'"), ("checkpoint", "# here"))
    assert "line 8 may read what is written: open()" in str(made)
    named = text.replace("str(folder / f'{n}.pt')", "folder.path").replace(
        "def save", "def call(x):\n    self.call(x)\n\ndef save"
    )
    after, _ = mended(tmp_path, named, ("checkpoint", "# here"))
    assert "    write_later(torch.save, net.state_dict(), folder.path)" in after


@pytest.mark.parametrize(
    "before, after, why",
    [
        (
            "    torch.save(net",
            "    best = torch.load('net1.pt')\n    torch.save(net",
            "line 11 may read what is written: load()",
        ),
        ("for epoch", "def best():\n    return open('x.png')\nfor epoch", "line 6 may read what is written: open()"),
        ("step(x)", "with torch.cuda.stream(side): step(x)", "the file uses streams or graphs"),
        ('"net%d.pt" % epoch', "file", "wanted torch.save(value, path)"),
        ("for epoch", "copy = 3\nfor epoch", "the name copy is taken in this file"),
    ],
    ids=["read in the loop", "read by a function", "a stream", "a file", "a name"],
)
def test_a_file_that_may_be_read_is_written_at_once(tmp_path, before, after, why):
    assert SAVED.count(before) == 1
    _, made = mended(tmp_path, SAVED.replace(before, after), ("checkpoint", "# there"))
    assert not made.patches and f"later: {why}" in next(iter(made.refused.values())), made.refused


def test_a_copy_is_written_and_an_error_is_raised_later():
    space: dict = {"torch": torch}
    exec(HELPER.replace("atexit.register", "end = "), space)
    go, wrote = threading.Event(), []

    def write(value, name, scale=1):
        assert go.wait(60) and threading.current_thread() is not threading.main_thread()
        if name == "full":
            raise OSError("the disk is full")
        wrote.append((name, value["w"].tolist() if isinstance(value, dict) else value.tolist(), scale))

    weight = torch.ones(2)
    space[NAME](write, {"w": weight}, "a")
    space[NAME](write, weight, "b", scale=2)
    space[NAME](write, weight, "full")
    weight.zero_()  # the next step
    go.set()
    with pytest.raises(OSError, match="full"):
        space["end"]()
    assert wrote == [("a", [1.0, 1.0], 1), ("b", [1.0, 1.0], 2)]
    with pytest.raises(OSError, match="full"):
        space[NAME](write, weight, "c")


def test_few_copies_are_kept_at_a_time():
    space: dict = {"torch": torch}
    exec(HELPER.replace("atexit.register", "end = "), space)
    go, wrote = threading.Event(), []

    def write(value, name):
        assert go.wait(60)
        wrote.append(name)

    for name in "abcd":
        space[NAME](write, torch.ones(2), name)
    fifth = threading.Thread(target=space[NAME], args=(write, torch.ones(2), "e"))
    fifth.start()
    fifth.join(0.1)
    assert fifth.is_alive(), "it waits until one is written"
    go.set()
    fifth.join()
    space["end"]()
    assert wrote == list("abcde")


TRAINED = """\
from collections import Counter
import torch
from torch.utils.data import DataLoader

torch.manual_seed(0)
table = torch.rand(8)
mask = torch.tensor([True, False, True, True], device="cuda")
model = torch.nn.Linear(3, 4).cuda()
log_alpha = torch.zeros(1, requires_grad=True, device="cuda")
optimizer = torch.optim.SGD([*model.parameters(), log_alpha], lr=0.1)
alpha = log_alpha.exp().item()


def take(table, t):
    out = table.gather(-1, t.cpu())
    return out.reshape(-1, 1).to(t.device)


class Bar:
    def set_postfix(self, **values):
        print(values)


class Tracker:
    def log(self, values, step):
        print(step, values)


bar, tracker, kept, taken, logs = Bar(), Tracker(), [], Counter(), {"a": [], "b": []}
train, held = DataLoader(torch.rand(32, 3), batch_size=4), DataLoader(torch.rand(8, 3), batch_size=4)
for epoch in range(2):
    rows = []
    for step, x in enumerate(train):
        x = x.to("cuda")
        weights = torch.ones(4).to(x.device)
        t = (x[:, 0] * 8).long()
        out = model(x) * take(table, t)
        loss = (out[mask] * weights[mask][:, None]).square().mean() + 0.01 * (log_alpha - alpha * out.detach()).mean().square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        alpha = log_alpha.exp().item()
        best = out.argmax(1)
        for i in range(4):
            if best[i].item() == 9:
                print("never")
        logs["a"].append(loss.item())
        logs["b"].append(round(float(out.detach().mean()), 3))
        kept.append(out.detach().cpu())
        taken.update(best.tolist())
        rows.extend(best.cpu().numpy())
        shown = {"loss": loss.detach().item(), "step": step}
        bar.set_postfix(**shown)
        tracker.log(shown, step=step)
        print(f"{epoch} {step + 1}: {loss.item():.5f}", "%.4f" % out.max().item(), weights.shape[0])
    print(epoch, len(rows), taken["a"], sum(logs["a"]), logs["b"][-1], torch.cat(kept).sum().item(), sum(rows))
"""


def test_a_loop_of_public_scripts_waits_no_more_and_shows_the_same(tmp_path, sim, capsys):
    result = patched(tmp_path, TRAINED)
    assert result.names == sorted(
        ["copies", "elements", "gathered", "made_there", "positions", "staged", "tensor", *["read_later"] * 7]
    ), str(result.repair)
    assert not result.repair.refused and result.proof.holds and result.proof.losses == 16
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * (16 * 3 + 2) and lines[:50] == lines[50:], "the same text in the same order"
    assert result.before.totals["syncs"] > 16 * 9 and result.after.totals["syncs"] == 16, "one wait for `best`"
    assert "torch.ones(4, device=x.device)" in result.text and "best_read = best.flatten().tolist()" in result.text
    assert (
        "resident(table, t.device).gather(-1, t)" in result.text
        and "(out[positions(mask)] * weights[positions(mask)]" in result.text
    )
    assert result.text.count("pin_memory=True") == 2 and result.text.count("    read_later()\n") == 1


@pytest.mark.parametrize(
    "before, after, mark, why",
    [
        ("rows.extend", "rows.extend([1]); rows.extend", "rows.extend", "holds several statements"),
        ("        print(f", "        n = loss.item(); print(f", "print(f", "holds several statements"),
        ("        bar.set", "        print(rows)\n        bar.set", "rows.extend", "rows is used inside the loop, in line 53"),
        ("        bar.set", "        print(shown)\n        shown = bar\n        bar.set", "shown = {", "is used for more than"),
        (
            "        bar.set",
            "        while rows:\n            break\n        bar.set",
            "rows.extend",
            "rows is used inside the loop",
        ),
        ("print(f", "if step: print(logs, f", "print(logs", "logs is changed in line 47"),
        ("print(f", "if step: print(f", "print(f", "reads a value inside sorted"),
        ("reshape(-1, 1).to(t.device)", "numpy()", "gather(", "may be needed on the host"),
        ("        print(f", "        with bar as g:\n            if g: print(g, f", "print(g", "g ends with its block"),
        ("bar.set_postfix(**", "[bar][step].set_postfix(**", "shown = {", "step is another object"),
        ("bar.set_postfix(**shown)", "bar.update(loss.item())", "bar.update", "class Bar has no method update"),
        ("- alpha * out", "- 2 * alpha * out", "        alpha = ", "alpha is used in every step"),
        ("            if best[i]", "            best[0] = 1\n            if best[i]", "if best[i]", "best changes in the loop"),
    ],
)
def test_what_would_be_shown_or_computed_otherwise_is_left(tmp_path, before, after, mark, why):
    assert TRAINED.count(before) == 1
    text = TRAINED.replace(before, after)
    if "sorted" in why:
        text = text.replace("out.max().item()", "sorted([out.max().item()])")
    kind = "h2d" if mark == "weights = " else "d2h" if mark in ("gather(", "rows.extend") else "sync"
    _, made = mended(tmp_path, text, (kind, mark), remedy=AT_ONCE if mark == "if best[i]" else "")
    assert why in str(made) and not made.changes, made


@pytest.mark.gpu
def test_a_gpu_shows_the_same_and_waits_at_the_ends_of_loops(tmp_path, device, capsys):
    """All but the number that is computed with, which is rounded elsewhere."""
    kinds = {"d2h": ("gather(", "kept.append", "taken.update", "rows.extend"), "h2d": ("weights =", "x = x.to")}
    reads = ("loss = (", 'logs["a"].append', 'logs["b"].append', "shown = {", "print(f")
    found = [(kind, mark) for kind, marks in kinds.items() for mark in marks] + [("sync", mark) for mark in reads]
    text, made = mended(tmp_path, TRAINED, *found, remedy=STAYING)
    assert not made.refused and made.equal, made
    seen = []
    for number, source in enumerate((TRAINED, text)):
        (tmp_path / f"{number}.py").write_text(source)
        with watch(device=device) as ledger:
            runpy.run_path(str(tmp_path / f"{number}.py"))
        seen.append((capsys.readouterr().out, ledger.totals["syncs"]))
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] - seen[1][1] > 16 * 12, "each step waits for `alpha`, and four times for `best`, of 20 times"
