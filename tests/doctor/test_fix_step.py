"""gb.TrainStep as a patch: the patched copy computes the same losses, and what is no plain loop is left alone."""

import runpy

import pytest

from gpubound.doctor.fix.repair import Target, repair
from tests.messages import message

SCRIPT = """\
import torch
from torch.nn import functional

torch.manual_seed(0)
data = [(torch.rand(4, 3), torch.rand(4, 1)) for _ in range(5)]
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
weight = 0.5  # of the loss
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
losses = []
for epoch in range(3):
    for step, (x, y) in enumerate(data):
        x = x.to("cpu")
        optimizer.zero_grad()
        guess = model(x)
        loss = weight * functional.mse_loss(guess, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
losses = [loss.item() for loss in losses]
"""


def proposed(tmp_path, text: str):
    path = tmp_path / "train.py"
    path.write_text(text)
    line = next(n for n, words in enumerate(text.splitlines(), 1) if ".step()" in words)
    return path, repair([Target("launch_bound", str(path), line)])


FUNCTION = """\
import torch
def train(model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for batch in data:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        kept.append(loss.item())
    return kept
torch.manual_seed(0)
losses = train(torch.nn.Linear(3, 1), [torch.rand(4, 3) for _ in range(4)])
"""
PICKED = """\
import torch
torch.manual_seed(0)
data = [(torch.rand(4, 3), torch.rand(4, 1)) for _ in range(3)]
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(6):
    x, y = data[step % 3]
    loss = (y - model(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
GLOBAL = """\
import torch
from torch.nn import functional
torch.manual_seed(0)
data = [(torch.rand(4, 3), torch.rand(4, 1)) for _ in range(5)]
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), 1e-2, betas=(0.8, 0.99))
def error(guess, y):
    return functional.mse_loss(guess, y)
def train(epoch):
    total = 0.0
    for step, (x, y) in enumerate(data):
        x, y = x.to("cpu"), y.to("cpu")
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            guess, scale = model(x), 2
            loss = scale * error(guess, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        total += loss.detach()
        optimizer.step()
    return total
if __name__ == "__main__":
    losses = [train(epoch).item() for epoch in range(3)]
"""
GIVEN = """\
import torch
def train(args, model, data, opt, epoch):
    model.train()
    total = 0.0
    for x in data:
        opt.zero_grad()
        loss = args["scale"] * model(x).square().mean()
        loss.backward()
        opt.step()
        total += loss.item()
    return total
def main():
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=0.5)
    args = {"scale": 2}
    losses = []
    for epoch in range(3):
        losses.append(train(args, net, [torch.ones(4, 3) / 3, torch.ones(4, 3) / 5], opt=optimizer, epoch=epoch))
    return losses
if __name__ == "__main__":
    losses = main()
"""


COPIES = {
    "a loop of a module": (
        SCRIPT,
        15,
        ("doctor/fix_step:the_patched_copy_compute", "doctor/fix_step:the_patched_copy_compute.2"),
    ),
    "a function's own names, a batch of one name, zero_grad at the end": (
        FUNCTION,
        4,
        ("doctor/fix_step:a_function_and_a_single",),
    ),
    "a batch that a counter picks, whose second part is read first": (PICKED, 6, ()),
    "a global optimizer, autocast and clipping": (GLOBAL, 3, ()),
    "an optimizer that a function is given": (GIVEN, 3, ()),
}


@pytest.mark.parametrize("name", COPIES)
def test_the_patched_copy_computes_the_same_losses(tmp_path, name):
    """What reads the loss alone stands after the step."""
    text, count, written = COPIES[name]
    path, made = proposed(tmp_path, text)
    assert not made.refused and not made.equal, made
    before = runpy.run_path(str(path), run_name="__main__")["losses"]
    made.apply()
    after = path.read_text()
    assert all(message(words).within(after) for words in written)
    assert "backward()" not in after and after.count("gb.TrainStep(") == 1
    losses = runpy.run_path(str(path), run_name="__main__")["losses"]
    assert len(set(before)) == count and losses == pytest.approx(before, rel=1e-5)


def test_a_finding_names_the_loop_or_the_line_that_updates(tmp_path):
    path, made = proposed(tmp_path, SCRIPT)
    loop = next(n for n, words in enumerate(SCRIPT.splitlines(), 1) if "enumerate(data)" in words)
    again = repair([Target("launch_bound", str(path), loop)])
    assert not again.refused and again.diff() == made.diff()
    (why,) = repair([Target("launch_bound", str(path), loop - 1)]).refused.values()
    assert "line 17 makes the step under a condition or in a nested loop" in why
    path.write_text(SCRIPT.replace("optimizer.step()", "optimizer.step()\n        scheduler.step()"))
    (why,) = repair([Target("launch_bound", str(path), loop)]).refused.values()
    assert "the loop makes several steps, in lines 17 and 18" in why
    assert "+    loss = train_step([(x, y)]).loss" in proposed(tmp_path, PICKED)[1].diff(), "parts of a batch keep their order"


def test_an_optimizer_that_is_not_ours_and_one_of_another_library_are_kept(tmp_path):
    for old, new in (("Adam(model.parameters(), 1e-2", "RAdam(model.parameters(), 1e-2"), ("torch.optim.Adam", "other.Adam")):
        _, made = proposed(tmp_path, GLOBAL.replace(old, new))
        assert (
            f"lambda parameters: {new.partition('(')[0].replace('RAdam', 'torch.optim.RAdam')}(parameters, 1e-2" in made.diff()
        )


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("opt=optimizer", "opt=make()", "does not give opt by a name"),
        ("    return losses\n", "    train(args, net, [], optimizer, 9)\n", "is not called in one place alone"),
        ("    args = {", "    scheduler = StepLR(optimizer)\n    args = {", "give the step schedule=gb.Schedule(...)"),
        ("train(args, net, [", "train({'scale': 2}, net, [", "the forward reads args, which only the function"),
        ("        loss.backward()\n", "        loss.backward()\n        total += epoch_of(loss)\n", "something stands between"),
        ("optimizer = torch", "scaler = torch.amp.GradScaler()\n    optimizer = torch", "which has its own, by hand"),
    ],
)
def test_what_a_function_does_not_give_is_refused(tmp_path, old, new, why):
    assert old in GIVEN
    _, made = proposed(tmp_path, GIVEN.replace(old, new))
    assert not made.changes and why in next(iter(made.refused.values())), made


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("losses = []\n", "losses = []\nscheduler = Schedule(optimizer)\n", "optimizer is used in another way in line 10"),
        ("        optimizer.step()\n", "        clip(model)\n        optimizer.step()\n", "something stands between backward"),
        (
            "        optimizer.step()\n",
            "        if step % 2:\n            optimizer.step()\n",
            "does not stand in the body of a loop",
        ),
        ("optimizer.zero_grad()\n", "pass\n", "has no single zero_grad(), loss.backward(), optimizer.step()"),
        ("weight * functional", "step * functional", "the forward reads step, which changes and is no part"),
        (
            "enumerate(data):\n        x = x",
            "tqdm(enumerate(data)):\n        x = step * x",
            "the forward reads x, which changes and is no part",
        ),
        ("weight * functional", "epoch * functional", "the forward reads epoch, which changes and is no part"),
        ("weight_decay=0.1)", "weight_decay=0.1); torch.manual_seed(1)", "line 8 holds several statements"),
        ("optimizer.zero_grad()", "optimizer.zero_grad(); x = x * 2", "line 13 holds several statements"),
        ('x = x.to("cpu")', "weight = 1 / (step + 1)", "the forward reads weight, which changes and is no part"),
        (
            'enumerate(data):\n        x = x.to("cpu")',
            "zip(range(5), data):\n        x = x * step",
            "the forward reads x, which changes and is no part",
        ),
        (
            "guess = model(x)",
            "guess = model(x + hidden)\n        hidden = guess.mean()",
            "the forward reads hidden, which changes and is no part",
        ),
        ("losses.append(", "print(guess), losses.append(", "guess is used outside the forward, in line 18"),
        ("guess = model(x)", "with half:\n            guess = model(x)", "stands more than plain assignments"),
        ("model.parameters(), lr", "some(model), lr", "optimizer is not made of model.parameters()"),
        ("weight = 0.5", "gb = weight = 0.5", "the name gb is taken in this file"),
        ("weight = 0.5", "dtype = torch.bfloat16", "the file uses 16-bit numbers"),
        ("losses.append(", "print(model[0].weight.grad), losses.append(", "line 18 uses gradients itself"),
    ],
)
def test_what_is_no_plain_loop_is_refused(tmp_path, old, new, why):
    assert old in SCRIPT
    _, made = proposed(tmp_path, SCRIPT.replace(old, new))
    assert not made.changes and why in next(iter(made.refused.values()))
