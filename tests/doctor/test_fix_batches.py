"""Batches of other people's scripts: windows of one array, and copies that a library makes. Scripts run before and after."""

import os
import runpy
import sys
from dataclasses import replace

import pytest

from gpubound.doctor.fix.repair import repair, targets
from gpubound.doctor.rules import remedies
from gpubound.watch.pretend_cuda import cuda_is_pretended

from .proofs import patched
from .test_fix import mended

WINDOWED = """\
import numpy as np, torch
array = (np.arange(99) % 13).astype(np.uint16)
data, n = torch.arange(99) % 7, 5
weight = torch.nn.Parameter(torch.rand(13, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
def batch():
    ix = torch.randint(len(data) - n, (4,))
    x = torch.stack([torch.from_numpy((array[i:i+n]).astype(np.int64)) for i in ix])  # x
    y = torch.stack([torch.from_numpy(array[i + 1 : i + n + 1].astype(np.int64)) for i in ix])  # y
    z = torch.stack([data[i : n + i] for i in ix])  # z
    return [t.pin_memory().to("cuda", non_blocking=True) for t in (x, y, z)]
for step in range(6):
    x, y, z = batch()
    loss = (weight[x] - weight[y] * z).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_windows_are_taken_by_one_index_with_equal_losses(tmp_path, sim):
    result = patched(tmp_path, WINDOWED)
    assert result.names == ["windows"] * 3 and result.repair.equal and result.proof.holds and result.proof.losses == 6
    assert "x = torch.from_numpy((array[(ix[:, None] + torch.arange(n)).numpy()]).astype(np.int64))  # x" in result.text
    assert "array[(ix[:, None] + 1 + torch.arange(n)).numpy()]" in result.text
    assert "z = data[ix[:, None] + torch.arange(n)]  # z" in result.text


@pytest.mark.parametrize(
    ("old", "new", "mark", "why"),
    [
        ("(len(data) - n, (4,))", "(-3, 9, (4,))", "# z", "ix is not known to be drawn"),
        ("ix = torch.randint(len(data) - n, (4,))", "ix = starts()", "# z", "ix is not known to be drawn"),
        ("(len(data) - n, (4,))", '(9, (4,), device="cuda")', "# z", "ix is not known to be drawn"),
        ("data[i : n + i]", "data[i : n]", "# z", "wanted torch.stack"),
        ("data[i : n + i]", "data[i : 2 * i]", "# z", "is no sum"),
        ("data[i : n + i]", "data[i : i + n : 2]", "# z", "does not go from i"),
        ("data[i : n + i]", "data[i + n : i]", "# z", "does not go from i"),
        ("data[i : n + i]", "flip(data[i : n + i])", "# z", "more than a slice"),
        ("data[i : n + i]", "data[i : n + i] * i", "# z", "wanted torch.stack"),
        ("for i in ix])  # z", "for i in ix], 1)  # z", "# z", "wanted torch.stack"),
        ("for i in ix])  # z", "for i in ix if i])  # z", "# z", "wanted torch.stack"),
        ("torch.stack([data[i : n + i] for i in ix])", "ix", "# z", "stacks no slices"),
    ],
)
def test_windows_that_an_index_might_not_give_are_refused(tmp_path, old, new, mark, why):
    assert old in WINDOWED
    _, made = mended(tmp_path, WINDOWED.replace(old, new), ("cpu_op", mark))
    assert not made.changes and why in str(made), made


SHOWN = """\
import torch
model = torch.nn.Linear(3, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    out = model(torch.rand(5, 3, device="cuda"))
    mean = out.mean().item()
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    largest = out.max().item()
    optimizer.step()
    print("step %d loss %.4f" % (step, loss.item()), mean, largest)
"""


def test_values_that_are_shown_in_a_line_that_waits_anyway_are_read_there(tmp_path, sim, capsys):
    result = patched(tmp_path, SHOWN)
    assert result.names == ["read_later"] + ["reads"] * 2 and result.repair.equal and result.proof.holds
    assert "(step, loss.item()), float(mean), float(largest)), step, loss, mean, largest)" in result.text
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and lines[:4] == lines[4:]
    assert result.before.totals["syncs"] >= 9 and result.after.totals["syncs"] == 0
    text, made = mended(tmp_path, SHOWN, ("sync", "mean = "), ("sync", "largest = "), ("sync", "print("), asked=["rarely"])
    assert "(step, loss.item()), float(mean), float(largest))" in text and "rarely" in str(made)
    _, made = mended(tmp_path, SHOWN.replace("loss.item()", "0.0"), ("sync", "mean = "))
    assert "mean is used in every step" in str(made)


GENERATING = """\
import torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
words = "abcd"
for step in range(4):
    out = model(torch.rand(9, 4, device="cuda"))
    loss = (out * (out < out[:, [-1]]) + out[[0], :].sum() + out[..., [2]]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    best = out.argmax(1)
    text = "".join([words[int(i)] for i in best])
    print(text, sum(i.item() + float(i) for i in best))
"""


def test_elements_are_read_at_once_and_a_list_of_one_index_is_a_slice(tmp_path, sim, capsys):
    result = patched(tmp_path, GENERATING)
    assert result.names == ["elements", "elements", "slice"] and result.repair.equal and result.proof.holds
    assert "(out < out[:, -1:]) + out[0:1, :].sum() + out[..., 2:3])" in result.text
    assert "[words[int(i)] for i in torch.as_tensor(best).tolist()]" in result.text
    assert "sum(i + float(i) for i in torch.as_tensor(best).tolist())" in result.text
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and lines[:4] == lines[4:]
    assert result.saved("h2d_copies") == 3, "one for each list"
    assert 3 * result.saved("syncs") == pytest.approx(3 * 3 + 4 * (3 * 9 - 2)), "two reads for the 27 of each print"


KEEPING = """\
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
table, total, seen = torch.rand(4), 0.0, []
rows = torch.tensor([[0, 1], [2, 3], [1, 1]])
for step in range(4):
    out = model(torch.rand(9, 4, device="cuda"))
    loss = (out * table.to("cuda")).square().mean()
    loss = loss + out[rows[:, 0], rows[:, 1]].sum() * 0.1
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    norms = [p.grad.norm().item() for p in model.parameters()]
    stats = {"mean": out.mean(), "max": out.max()}
    stats = {name: value.item() for name, value in stats.items()}
    value = loss.item()
    total += value * len(rows)
    seen.append(value)
    high, where = out.detach().max(1)
    print([(int(w), float(h)) for w, h in zip(where, high)], norms, stats)
print(total, seen)
"""


def test_what_is_read_or_copied_several_times_is_so_once(tmp_path, sim, capsys):
    result = patched(tmp_path, KEEPING)
    assert result.names == ["elements", "index", "reads", "resident", "stacked", "stacked"], str(result.repair)
    assert result.repair.equal and result.proof.holds
    assert '(out * resident(table, "cuda"))' in result.text and "out[rows_on_device[:, 0], rows_on_device[:, 1]]" in result.text
    assert "norms = numbers([p.grad.norm() for p in model.parameters()])" in result.text
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[:5] == lines[5:]
    assert result.saved("h2d_copies") == 1 + 3 and result.saved("syncs") > 3 + 1 + 1 + 16, "an index is copied in backward, too"
    for number, text in enumerate((KEEPING, result.text)):
        (script := tmp_path / f"changing{number}.py").write_text(text.replace("    high,", "    table.add_(0.1)\n    high,"))
        with cuda_is_pretended():
            runpy.run_path(str(script))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[:5] == lines[5:], "a copy of a tensor that changes is made again"
    for old, new, found, remedy, why in (
        ("seen.append(value)", "seen.append(value); print(value)", ("sync", "value = loss"), "", "used in every step"),
        ("table.to", "(table * 2).to", ("repeat", "(table"), "", "copies no tensor that has a name"),
        (".item() for p", ".item() + 1 for p", ("sync", "norms ="), remedies.STACKED, "made of .item() alone"),
    ):
        _, made = mended(tmp_path, KEEPING.replace(old, new), found, remedy=remedy)
        assert why in str(made)


TYPED = """\
import numpy as np, torch
torch.manual_seed(0)
Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
loader = torch.utils.data.DataLoader(torch.rand(16, 4), batch_size=4)
model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    real = batch.type(Tensor)
    valid = Tensor(np.ones((4, 1)))
    fake = Tensor(4, 1).fill_(0.0)
    loss = (model(real) - valid + fake).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_types_of_older_scripts_copy_from_pinned_memory(tmp_path, sim):
    result = patched(tmp_path, TYPED)
    assert result.names == ["copies", "staged"] and result.repair.equal and result.proof.holds, str(result.repair)
    assert "batch_size=4, pin_memory=True)" in result.text and "batch.type(Tensor, non_blocking=True)" in result.text
    assert "valid = pinned(torch.FloatTensor(np.ones((4, 1)))).type(Tensor, non_blocking=True)" in result.text
    assert result.saved("pageable_copies") == 2


@pytest.mark.parametrize(
    ("old", "new", "kind", "mark", "why"),
    [
        ("out[[0], :].sum()", "out[[0, 1], :].sum()", "h2d", "loss =", "slice: the line has no list of one number"),
        ("out[[0], :].sum()", "out[[0]].sum()", "h2d", "loss =", "slice: the line has no list of one number"),
        ("out[[0], :].sum()", "out[[step], :].sum()", "h2d", "loss =", "slice: the index step is no number"),
        ("best = out.argmax(1)", "best = out[:, [1]]", "h2d", "best =", "slice: the selection is kept"),
        ("words[int(i)]", "words[i]", "sync", "words[", "elements: no comprehension or loop"),
        ("for i in best]", "for i in best if i > 1]", "sync", "words[", "elements: no comprehension or loop"),
    ],
)
def test_other_indices_and_comprehensions_are_refused(tmp_path, old, new, kind, mark, why):
    text = GENERATING.replace("out < out[:, [-1]]", "out < 1").replace(" + out[..., [2]]", "")
    assert old in text
    _, made = mended(
        tmp_path, text.replace(old, new), (kind, mark), remedy=remedies.SLICE if kind == "h2d" else remedies.AT_ONCE
    )
    assert not made.changes and why in str(made), made


ACCELERATED = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

options = {}
options["step_scheduler_with_optimizer"] = False
accelerator = Accelerator(gradient_accumulation_steps=1, **options)
loader = DataLoader(TensorDataset(torch.rand(16, 4), torch.rand(16, 1)), batch_size=4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = (model(x) - y).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def fresh():
    """The device of a process's first Accelerator is that of all."""
    accelerate = pytest.importorskip("accelerate")

    def reset():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)

    reset()
    yield
    reset()


def test_accelerate_copies_from_pinned_memory_without_waiting(tmp_path, sim, fresh):
    result = patched(tmp_path, ACCELERATED)
    assert result.names == ["accelerate"] and result.repair.equal and result.proof.holds and result.proof.losses == 4
    assert (result.saved("pageable_copies"), result.after.totals["pageable_copies"]) == (2, 0)
    assert not [row for row in result.after.rows if row.kind == "sync" and row.place.site], result.after
    for old, new, why in (
        ("Accelerator(g", "Accelerator(dataloader_config=config, g", "passes dataloader_config"),
        ("batch_size=4)", "batch_size=4, **given)", "passes **given"),
        ("Accelerator(", "made(", "no single Trainer(args=...)"),
    ):
        made = again(result, tmp_path, ACCELERATED.replace(old, new))
        assert why in str(made) and not made.changes


def again(result, folder, text: str):
    """The repair of another text for the same findings."""
    (folder / "train.py").write_text(text)
    return repair([replace(target, code="") for target in targets(result.verdict.findings)])


TRAINED = """\
import torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean()}

rows = [{"x": torch.rand(4), "labels": torch.rand(1)} for _ in range(8)]
arguments = TrainingArguments("out", max_steps=4, per_device_train_batch_size=2, report_to="none", save_strategy="no",
                              disable_tqdm=True, dataloader_pin_memory=True)
trainer = Trainer(model=Model(), args=arguments, train_dataset=rows)
trainer.train()
"""


@pytest.mark.slow
def test_trainer_copies_without_waiting_and_on_request_checks_no_loss(tmp_path, sim, fresh, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    environment = dict(os.environ)
    result = patched(tmp_path, TRAINED)
    assert result.names == ["accelerate"] and result.proof.holds and result.proof.losses == 4
    assert "arguments.accelerator_config.non_blocking = True\ntrainer = Trainer(" in result.text and result.saved("syncs") >= 2
    both = patched(tmp_path, TRAINED, asked=["unfiltered"])
    assert both.names == ["accelerate", "unfiltered"] and both.proof.holds
    assert "arguments.logging_nan_inf_filter = False\n" in both.text and both.saved("syncs") > result.saved("syncs")
    os.environ.clear()
    os.environ.update(environment)


LIGHTNING = """\
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

loader = torch.utils.data.DataLoader(torch.rand(16, 4), batch_size=4)
model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    loss = model(move_data_to_device(batch)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_loader_of_lightning_is_pinned(tmp_path, sim, monkeypatch):
    """A stand-in for the library's file, which copies with non_blocking=True as it does."""
    home = tmp_path / "site-packages" / "lightning" / "fabric" / "utilities"
    home.mkdir(parents=True)
    (home / "apply_func.py").write_text("def move_data_to_device(t):\n    return t.to('cuda', non_blocking=True)\n")
    monkeypatch.setattr(sys, "path", [sys.path[0], str(tmp_path / "site-packages"), *sys.path[1:]])
    result = patched(tmp_path, LIGHTNING)
    assert result.names == ["pin_loaders"] and result.proof.holds and "batch_size=4, pin_memory=True)" in result.text
    assert (result.saved("pageable_copies"), result.after.totals["pageable_copies"]) == (1, 0)
    assert "without pin_memory" in str(again(result, tmp_path, LIGHTNING.replace("batch_size=4", "batch_size=4, pin_memory=1")))
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
        del sys.modules[name]


TAGGED = """\
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 5).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weights, moves = torch.rand(5), torch.rand(5, 5, device="cuda")
average, towers = (torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(8))).cuda() for _ in range(2))


def score(out, tags, ends):
    rows = torch.arange(len(out))
    total = out[rows, 0, tags[:, 0]]
    for i in range(1, out.size(1)):
        total = total + moves[tags[:, i - 1], tags[:, i]] * out[rows, i, tags[:, i]]
    return total + out[rows, ends, 0]


def pick(t):
    return weights[t.cpu()].to("cuda")


total_loss = right = 0
for step in range(4):
    out = model(torch.rand(6, 3, 4, device="cuda"))
    tags, lengths = torch.randint(0, 5, (6, 3), device="cuda"), torch.tensor([1, 2, 3, 1, 2, 3], device="cuda")
    loss = (score(out, tags, lengths - 1) * pick(tags[:, 0])).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for p, q in zip(average.parameters(), towers.parameters()):
        p.data = p.data * 0.9 + q.data * (1.0 - 0.9)
    total_loss += float(loss.detach())
    right += int(out.argmax(-1).eq(tags).sum())
    words = 0
    for row, length in zip(tags, lengths):
        gold = row[:length].tolist()
        words += sum(gold)
    for b in range(6):
        for word in gold[: lengths[b].item()]:
            words += word
    print(words)
print(f"{total_loss / 4:.5f} {right / 8}", sum(p.sum() for p in average.parameters()).item())
"""


QUEUED = """\
import torch
model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
place, shown = torch.zeros(2, dtype=torch.long, device="cuda"), []
for step in range(4):
    loss = model(torch.rand(3, 4, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    place[0] = step
    place[-1] = 2 * step
    norm = sum(p.grad.norm(2).item() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
    shown.append(norm)
print(shown, place.sum().item())
"""


def test_numbers_that_are_written_and_a_sum_of_norms(tmp_path, sim, capsys):
    result = patched(tmp_path, QUEUED)
    assert result.names == ["filled", "filled", "stacked"] and result.proof.holds, str(result.repair)
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and "place[0:1] = step\n    place[-1:] = 2 * step\n" in result.text
    assert result.before.totals["syncs"] == 4 * (2 + 2) + 1, "after the first update: two numbers, two norms, and the print"
    assert result.after.totals["syncs"] == 4 + 1


def test_rows_that_a_loop_reads_and_indices_that_a_function_makes(tmp_path, sim, capsys):
    result = patched(tmp_path, TAGGED)
    assert result.names == ["elements", "elements", "foreach", "gathered", "index", "reads", "reads", "staged"], str(
        result.repair
    )
    assert not result.repair.refused and result.proof.holds and result.proof.losses == 4
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[:5] == lines[5:]
    assert "rows = torch.arange(len(out), device=out.device)" in result.text
    assert "in zip(tags.tolist(), lengths.tolist()):\n        gold = row[:length]\n" in result.text
    assert result.after.totals["syncs"] <= 3 * 4 + 3 and result.saved("syncs") >= 20, (
        "three times all rows, and the sums' print"
    )
