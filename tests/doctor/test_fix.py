"""Patches: what they write, what they refuse, and that a patched script computes the same losses with fewer waits."""

import runpy

import pytest

from gpubound.doctor.finding import Finding
from gpubound.doctor.fix.repair import PATCHES, Repair, Target, repair, targets
from gpubound.watch import watch
from gpubound.watch.source_line import Site
from tests.messages import message, refusal


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
    assert [line for line in before if line not in after] == [
        message("doctor/fix:every_other_byte_stays"),
        message("doctor/fix:every_other_byte_stays.2"),
        message("doctor/fix:every_other_byte_stays.3"),
        message("doctor/fix:every_other_byte_stays.4"),
        message("doctor/fix:every_other_byte_stays.5"),
        message("doctor/fix:every_other_byte_stays.6"),
        message("doctor/fix:every_other_byte_stays.7"),
        message("doctor/fix:every_other_byte_stays.8"),
    ]
    assert [line for line in after if line not in before] == [
        message("doctor/fix:every_other_byte_stays.9"),
        message("doctor/fix:every_other_byte_stays.10"),
        message("doctor/fix:every_other_byte_stays.11"),
        message("doctor/fix:every_other_byte_stays.12"),
        message("doctor/fix:every_other_byte_stays.13"),
        message("doctor/fix:every_other_byte_stays.14"),
        message("doctor/fix:every_other_byte_stays.15"),
        message("doctor/fix:every_other_byte_stays.16"),
    ]


HEAD = "import time, torch\n"
LOOP = HEAD + "total = 0.0\nfor step in range(9):\n    {}\nprint(total)\n"
CASES = {
    "workers": (
        "data",
        HEAD + "loader = DataLoader(d, 8, shuffle=True)  # here\n",
        HEAD + "loader = DataLoader(d, 8, shuffle=True, num_workers=4, pin_memory=True)  # here\n",
    ),
    "workers, of the loop": (
        "data",
        "a = DataLoader(x)\nb = DataLoader((y), num_workers=0)\nfor batch in enumerate(b):  # here\n    pass\n",
        "a = DataLoader(x)\nb = DataLoader((y), num_workers=4, pin_memory=True)\n"
        "for batch in enumerate(b):  # here\n    pass\n",
    ),
    "an argument in brackets": (
        "optimizer",
        "o = AdamW((\n    ps  # all\n))  # here\n",
        "o = AdamW((\n    ps  # all\n), fused=True)  # here\n",
    ),
    "foreach": (
        "optimizer",
        "o = optim.SGD(ps, foreach=True, lr=1)  # here\n",
        "o = optim.SGD(ps, fused=True, lr=1)  # here\n",
    ),
    "fused, said to be not": ("optimizer", "o = Adam(ps, fused=False)  # here\n", "o = Adam(ps, fused=True)  # here\n"),
    "zeroed, by position": ("zero_grad", "m.zero_grad( False )  # here\n", "m.zero_grad()  # here\n"),
    "no optimizer in the line": (
        "optimizer",
        "o = SGD(ps)\no.zero_grad(set_to_none=False)  # here\n",
        "o = SGD(ps)\no.zero_grad()  # here\n",
    ),
    "the only statement of a block": ("free", "if x:\n    torch.cuda.empty_cache()  # here\n", "if x:\n    pass  # here\n"),
    "a wait with a semicolon": ("sync", "y()\ncuda.synchronize();  # here\nz()\n", "y()\nz()\n"),
    "a wait": ("sync", "if x:\n    y()\n    torch.cuda.synchronize()  # here\n", "if x:\n    y()\n"),
    "a sum": (
        "sync",
        LOOP.format("total += loss.item() / 8  # here"),
        LOOP.replace("(total)", "(float(total))").format("total += loss.detach().to(torch.float64, copy=True) / 8  # here"),
    ),
    "a count": (
        "sync",
        LOOP.replace("0.0", "0").format("total += (a == b).sum().item()  # here"),
        LOOP.replace("(total)", "(int(total))").replace("0.0", "0").format("total += (a == b).sum().detach()  # here"),
    ),
    "a count that begins as 0.0": (
        "sync",
        LOOP.format("total += (a == b).sum().item()  # here"),
        LOOP.replace("(total)", "(float(total))").format(
            "total += (a == b).sum().detach().to(torch.float64, copy=True)  # here"
        ),
    ),
    "a sum in brackets": (
        "sync",
        LOOP.format("total += (a + b).item()  # here"),
        LOOP.replace("(total)", "(float(total))").format("total += (a + b).detach().to(torch.float64, copy=True)  # here"),
    ),
    "a sum before another statement": (
        "sync",
        LOOP.format("total += loss.item(); step.sum()  # here"),
        LOOP.replace("(total)", "(float(total))").format(
            "total += loss.detach().to(torch.float64, copy=True); step.sum()  # here"
        ),
    ),
    "copies beside each other": (
        "h2d",
        "l = DataLoader(d)\nx = x.to(a); y = y.to(a)  # here\n",
        "l = DataLoader(d, pin_memory=True)\nx = x.to(a, non_blocking=True); y = y.to(a, non_blocking=True)  # here\n",
    ),
    "zeroed before another statement": ("zero_grad", "o.zero_grad(False); f()  # here\n", "o.zero_grad(); f()  # here\n"),
    "a list that others hold": (
        "sync",
        HEAD + "losses = []\nkept = {'loss': losses}\nfor x in data:\n    losses.append(x.item())  # here\nlog(kept)\n",
        HEAD + "losses = []\nkept = {'loss': losses}\nfor x in data:\n"
        "    losses.append(x.detach().to(torch.float64, copy=True))  # here\n"
        "losses[:] = [float(value) for value in losses]\nlog(kept)\n",
    ),
    "a name": (
        "sync",
        LOOP.format("total = loss.item()  # here\n    if step % 3 == 0: log(total)"),
        LOOP.replace("print(total)", "print(float(total))").format(
            "total = loss.detach().to(torch.float64, copy=True)  # here\n    if step % 3 == 0: log(float(total))"
        ),
    ),
    "without a last newline": ("zero_grad", "o.zero_grad(False) # here", "o.zero_grad() # here"),
    "lines of Windows": ("sync", "if x:\r\n  y()\r\n  cuda.synchronize() # here\r\nz()\r\n", "if x:\r\n  y()\r\nz()\r\n"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_patch(name, tmp_path):
    kind, before, after = CASES[name]
    text, made = mended(tmp_path, before, (kind, "# here"))
    assert text == after, made.refused


REFUSED = {
    "loader: the DataLoader has workers; if they are too slow": ("data", "l = DataLoader(d, num_workers=8)  # here\n"),
    "loader: line 2 passes **o, which may hold the same": (
        "data",
        "o = {'num_workers': 1}\nl = DataLoader(d, **o); f(o['x'])  # here\n",
    ),
    "optimizer: line 2 writes foreach in an unusual way": ("optimizer", "o = {'foreach': True}\nAdam(ps, **o)  # here\n"),
    "loader: num_workers is set outside of a dictionary's brackets": (
        "data",
        "o = {}\nif gpu:\n    o['num_workers'] = 1\nl = DataLoader(d, **o)  # here\n",
    ),
    "loader: line 1 takes num_workers from args.workers; raise it there": (
        "data",
        "l = DataLoader(d, num_workers=args.workers)  # here\n",
    ),
    "loader: line 4 takes num_workers from args.workers; raise it there": (
        "data",
        "p.add_argument('--workers', default=2)\nargs = p.parse_args()\nprint(args.workers)\n"
        "l = DataLoader(d, num_workers=args.workers)  # here\n",
    ),
    "loader: line 1 passes **options": ("data", "l = DataLoader(d, **options)  # here\n"),
    "loader: there are 2 DataLoaders in this file": ("data", "a = DataLoader(d)\nb = DataLoader(e)\nf()  # here\n"),
    "loader: each worker would go over the whole IterableDataset": (
        "data",
        "class D(IterableDataset): pass\nl = DataLoader(D())  # here\n",
    ),
    "loader: there is no DataLoader in this file": ("data", "f()  # here\n"),
    "copies: it moves what Net() makes; move a module once": ("h2d", "l = DataLoader(d)\nm = Net()\nm.cuda()  # here\n"),
    "staged: it moves what Linear() makes; move a module once": ("h2d", "import torch\nm = nn.Linear(1, 2).to(a)  # here\n"),
    "copies: it copies to the host": ("h2d", "l = DataLoader(d)\ny = x.to('cpu')  # here\n"),
    "copies: the line makes what it copies by tensor(), so that no loader pins it": (
        "h2d",
        "l = DataLoader(d)\ny = torch.tensor(x)[None].float().to(a)  # here\n",
    ),
    "copies: it copies to more than one place": ("h2d", "l = DataLoader(d)\nf(x.to(a), y.to(b))  # here\n"),
    "copies: the batches must be pinned where they are made, and there is no": ("pageable", "x = x.cuda()  # here\n"),
    "reads: total is used in every step, in line 5": ("sync", LOOP.format("total += loss.item()  # here\n    log(total)")),
    "reads: total is used in every step, in line 6": (
        "sync",
        LOOP.format("total += loss.item()  # here\n    x = 1\n    if total > 3: stop()"),
    ),
    "reads: total is read in another function, in line 6": (
        "sync",
        LOOP.format("total += loss.item()  # here") + "def f(): return total\n",
    ),
    "reads: the loop around this line is in another function": ("sync", HEAD + "def f(x):\n    y = x.item()  # here\n"),
    "reads: line 5 computes with it inside an f-string": (
        "sync",
        LOOP.format("total += loss.item()  # here").replace("(total)", "(f'{abs(total)}')"),
    ),
    "line 5 computes with it inside an f-string": (  # of a whole number the device makes fp32
        "sync",
        LOOP.replace("0.0", "0").format("total += (a == b).sum().item()  # here").replace("(total)", "(f'{total / 9}')"),
    ),
    "reads: total may be what locals() gives in line 5": (
        "sync",
        LOOP.format("total += loss.item()  # here").replace("(total)", "(locals()['total'])"),
    ),
    "reads: the loop is inside a try: an exception would leave tensors in losses": (
        "sync",
        HEAD
        + "losses = []\ntry:\n    for x in data:\n        losses.append(x.item())  # here\nexcept OSError: pass\nlog(losses)\n",
    ),
    "reads: losses is used inside the loop, in line 5": (
        "sync",
        LOOP.format("losses.append(loss.item())  # here\n    if step: log(losses)"),
    ),
    "reads: line 4 holds several statements": ("sync", LOOP.format("total += loss.item(); mean += loss.item()  # here")),
    "waits: line 1 holds several statements": ("sync", "torch.cuda.synchronize(); f()  # here\n"),
    "reads: the line does not add the value up": ("sync", LOOP.format("play(loss.item())  # here")),
    "reads: the line computes with the value right away": ("sync", LOOP.format("total = loss.item() / 2  # here")),
    "reads: total is no number at first, in line 2": (
        "sync",
        LOOP.replace("0.0", "None").format("if step and total is None: log()\n    total = loss.item()  # here"),
    ),
    "reads: total is used as an index, in line 5": (
        "sync",
        LOOP.replace("(total)", "(names[total])").format("total = best.item()  # here"),
    ),
    "reads: what is added to total may be whole numbers; begin it as 0.0": (
        "sync",
        LOOP.replace("0.0", "0").format("total += mask.sum().item()  # here"),
    ),
    "reads: total may be a whole number or not": (
        "sync",
        LOOP.replace("0.0", "start").format("total += (a == b).sum().item()  # here"),
    ),
    "reads: losses is not made as a list in this function": (
        "sync",
        HEAD + "losses = []\ndef train():\n    for x in data:\n        losses.append(x.item())  # here\ntrain()\n",
    ),
    "reads: self.total may be what is read in line 5": (
        "sync",
        HEAD + "def run(self):\n    for x in data:\n        self.total += x.item()  # here\nprint(runner.total)\n",
    ),
    "reads: recent is not made as a list": (
        "sync",
        HEAD + "recent = deque(maxlen=9)\nfor x in data:\n    recent.append(x.item())  # here\n",
    ),
    "waits: the line waits for one stream or event": ("sync", "event.synchronize()  # here\n"),
    "waits: line 1 works on another stream or copies to the host": (
        "sync",
        "mirror.copy_(loss, non_blocking=True)\ntorch.cuda.synchronize()  # here\nprint(mirror)\n",
    ),
    "waits: line 2 goes on with the line before": ("sync", "if x: y(); \\\n  cuda.synchronize()  # here\nz()\n"),
    "waits: a clock is read next to it": ("sync", "torch.cuda.synchronize()  # here\nt = time.perf_counter() - t\n"),
    "waits: a clock is read next to it, which": (
        "sync",
        "if device == 'cuda':\n    torch.cuda.synchronize()  # here\nt = time.perf_counter() - t\n",
    ),
    "tf32: fp32 products run in TF32, which changes the numbers: ask for it by name": ("precision", HEAD + "f()  # here\n"),
    "rarely: the line does not print or log by itself": ("d2h", "for i, x in enumerate(data): play(x.cpu())  # here\n"),
    "reads: the file does not import torch by that name": (
        "sync",
        "import torch as t\nfor i in r:\n    total += loss.item()  # here\n",
    ),
    "no patch is written for gc": ("gc", "f()  # here\n"),
    "the file does not parse": ("sync", "if:  # here\n"),
    "the file begins with a byte order mark; remove it first": ("sync", "\ufefff()  # here\n"),
    "the file does not parse (unknown encoding: none)": ("sync", "# coding: none\nf()  # here\n"),
    "the file is in iso-8859-1": ("sync", "# coding: latin-1\nf()  # here\n"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_refusal(why, tmp_path):
    kind, before = REFUSED[why]
    text, made = mended(tmp_path, before, (kind, "# here"))
    (reason,) = made.refused.values()
    assert why in reason and text == before and not made.changes


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
    tried = {kind for kind, *_ in [*CASES.values(), *REFUSED.values()]} | {"launch_bound", "cpu_op"}
    assert all(patch.kinds & tried for patch in PATCHES.values())


OPTIONS = {
    "one without the workers": (
        "o = {}\no.update(o2)\no['shuffle'] = True\nl = DataLoader(d, **o)  # here\no2 = {}\n",
        "l = DataLoader(d, **o, num_workers=4, pin_memory=True)  # here\no2 = {}\n",
    ),
    "a conditional one": (
        "kwargs = {'num_workers': 1, 'pin_memory': True} if gpu else {}\nl = DataLoader(d, batch_size=4, **kwargs)  # here\n",
        "kwargs = {'num_workers': 4, 'pin_memory': True} if gpu else {}\n",
    ),
    "one that is updated": (
        "a = {'batch_size': 4}\nif gpu:\n"
        "    b = {'num_workers': 1,\n         'shuffle': True}\n    a.update(b)\nl = DataLoader(d, **a)  # here\n",
        "    b = {'num_workers': 4,\n         'shuffle': True, \"pin_memory\": True}\n",
    ),
    "an option of the command line": (
        "p.add_argument('-j', '--workers', type=int, default=2, help='h')\nargs = p.parse_args()\n"
        "l = DataLoader(d, num_workers=int(args.workers))  # here\n",
        "'--workers', type=int, default=4, help='h')\nargs = p.parse_args()\n"
        "l = DataLoader(d, num_workers=int(args.workers), pin_memory=True)  # here\n",
    ),
    "workers that are too few": (
        "l = DataLoader(d, num_workers=1, pin_memory=True)  # here\n",
        "l = DataLoader(d, num_workers=4, pin_memory=True)  # here\n",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_loader_s_options_are_found_in_dictionaries(tmp_path, name):
    text, wanted = OPTIONS[name]
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
