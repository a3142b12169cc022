"""Remedies by the library that reads, and by what a value is read for: real calls on the pretend device."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Normal
from torch.nn.utils.rnn import pack_padded_sequence

from gpubound.doctor.price.prices import Measurements
from gpubound.doctor.rules import remedies
from gpubound.doctor.rules.diagnose import diagnose
from gpubound.doctor.rules.waits import RESULT, ROUND_TRIP
from gpubound.watch import watch
from gpubound.watch.events import DEVIATION, HOST_DATA, NUMBER, UPLOAD, WAIT, Place, Site
from gpubound.watch.ledger import LedgerRow
from gpubound.watch.pretend import simgpu
from gpubound.watch.pretend_cuda import cuda_is_pretended

from .evidences import at, row, seen


class Meter:
    total = 0.0

    def update(self, value, count):
        self.total += value * count


def named(step) -> dict[str, str]:
    """The remedies of two steps, by the line's code."""
    with watch(device=simgpu()) as ledger:
        for _ in range(2):
            step()
            ledger.step()
    verdict = diagnose(Measurements("train.py", "pretend", ledger.rows, ledger.steps, ledger.counted))
    return {finding.line.code: finding.fix for finding in verdict.findings if finding.line}


def test_a_distribution_s_validation(monkeypatch):
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch._dynamo turns it off when it is imported
    logits = torch.zeros(2, 3, device=simgpu())
    found = named(lambda: Categorical(logits=logits))
    (fix,) = found.values()
    assert fix == remedies.LIBRARIES["torch/distributions/"]
    assert not named(lambda: Categorical(logits=logits, validate_args=False)), "the advice leaves no wait"


def test_a_sample_of_a_normal_distribution_checks_whatever_validates():
    mean, std = torch.zeros(3, device=simgpu()), torch.ones(3, device=simgpu())
    (fix,) = named(lambda: Normal(mean, std, validate_args=False).sample()).values()
    assert fix == DEVIATION.remedy
    assert not named(lambda: Normal(mean, std, validate_args=False).rsample().detach()), "the advice leaves no wait"


def test_a_transformer_s_mask():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1).to(simgpu())
    x, mask = torch.zeros(1, 3, 4, device=simgpu()), nn.Transformer.generate_square_subsequent_mask(3).to(simgpu())
    (fix,) = named(lambda: encoder(x, mask)).values()
    assert fix == remedies.LIBRARIES["torch/nn/modules/transformer.py"]
    assert not named(lambda: encoder(x, mask, is_causal=True)), "the advice leaves no wait"


def test_a_number_that_is_written_at_indices():
    x, index = torch.zeros(4, 3, device=simgpu()), torch.tensor([0, 2]).to(simgpu())

    def step():
        x[index] = -1.0
        x[0, 1] = 2.0

    assert set(named(step).values()) == {NUMBER.remedy}
    assert not named(lambda: (x.index_fill_(0, index, -1.0), x[0, 1:2].fill_(2.0))), "the advice leaves no wait"


def test_a_value_that_is_shown(capsys):
    loss, meter, total = torch.ones((), device=simgpu()), Meter(), []

    def step():
        print("loss", loss.item())
        text = f"{loss.item():.3f}"
        meter.update(loss.item(), 4)
        total.append(loss.item() + len(text))

    fixes, summed = list(named(step).values()), remedies.SUMMED.format("loss.detach()")
    assert [*map(fixes.count, (remedies.RARELY, remedies.LATER, summed))] == [2, 1, 1] and len(fixes) == 4


def test_a_value_whose_name_is_only_shown(capsys):
    """The print may be of several lines, and the name may be read in it alone."""
    loss, best = torch.ones((), device=simgpu()), 0.0

    def step():
        shown = loss.mean().item()
        decides = loss.mean().item()
        print("loss", shown, loss.item())
        if decides > best:
            print("best", decides)

    assert list(named(step).values()).count(remedies.RARELY) == 2
    assert [code for code, fix in named(step).items() if fix == remedies.BRANCHES] == ["decides = loss.mean().item()"]


class Env:
    def step(self, action):
        return action


env = Env()


def select(loss):
    return loss.argmax().item()


def trained(loss):
    value = loss.sum()
    return float(value)


USES = {
    "total = total + loss.item()": "SUMMED",
    "correct = loss.sum().item(); seen[0] = seen[0] + correct": "SUMMED",
    "losses.append(loss.detach().cpu().numpy())": "SUMMED",
    "value = trained(loss); print(value)": "RARELY",
    "total += trained(loss)": "SUMMED",
    "value = trained(loss); total += value; print(value) if step % 9 == 0 else None": "SUMMED",
    "sys.stdout.write('%f' % loss.item())": "RARELY",
    "action = select(loss); env.step(action)": "ACTED",
    "print(loss.item()) if step % 1 == 0 else None": "RARELY",
    "if step % 1 == 0: print(loss.item())": "RAISED",
    "if loss.item() < best: best = 1.0": "BEST",
    "if loss.item() < 0.5: best = 'other'": "BRANCHES",
    "if loss > 0: pass": "BRANCHES",
    "ends = torch.ones(3, 1).to(device); for row in ends:\n        first = row[0].tolist()": "EACH",
    "ends = torch.ones(3).to(device); for i in range(3):\n        for j in range(int(ends[i])): pass": "EACH",
    "x = torch.ones(3, 2).to(device); for i in range(3):\n        top = x[i].max(0)\n        if int(top.values): pass": "EACH",
    "ends = torch.ones(3, 2).to(device); for i in range(3):\n        last = (ends[i] + 1).sum().item()": "EACH",
    "while True:\n        if loss > 0: break": "LEAVES",
    "[p.norm().item() for p in (loss, loss)]": "STACKED",
    "{k: v.item() for k, v in {'a': loss, 'b': loss}.items()}": "STACKED",
    "[float(v) for v in torch.ones(9, device=device)]": "AT_ONCE",
    "ids = torch.zeros(3, device=device); for i in range(3): last = ids[i].item()": "AT_ONCE",
    "ids = torch.zeros(3, device=device); for i in range(3):\n        if ids[i].item() == 9: break": "AT_ONCE",
    "for name, value in {'a': loss, 'b': loss}.items(): seen[0] = value.item()": "STACKED",
    "assert loss >= 0": "ASSERTED",
    "value = loss.item(); if isinstance(value, float): print(value)": "RARELY",
    "loss[0] = torch.tensor([2.0]).to(device)": "HOST_DATA",
    "table[loss.long()] += 1": "ACCUMULATED",
    "loss + torch.tensor([1.0, 2.0]).to(device)": "HOST_DATA",
    "log.info('%f', loss.item())": "RARELY",
    "ids = torch.ones(3).to(device); for i, x in enumerate(ids):\n        if x != i: pass": "EACH",
    "ids = torch.ones(3).to(device); for i, x in enumerate(ids):\n        losses.append(x.item())": "EACH",
    "loss[rows[:, 0], rows[:, 1]]": "INDEX",
    "torch.cat([torch.ones(1), rows[0]]).to(device)": "",
    "torch.utils.data.DataLoader([1]); mask = torch.zeros(3); loss * mask.to(device)": "MADE",
    "torch.utils.data.DataLoader([1]); x = rows; x = torch.cat([x, x]); x = x.to(device); x = rows": "",
    "torch.utils.data.DataLoader([1]); x = rows; x = (x == x[0]).float(); x = x.to(device)": "",
    "ends = torch.ones(3).to(device).requires_grad_(); for i in range(3):\n        torch.autograd.grad(ends.sum(), ends)\n"
    "        right = torch.eq(ends, ends[i]).sum().item()\n        seen[0] = seen[0] + right": "SUMMED",
}


@pytest.mark.parametrize("code", USES)
def test_advice_by_what_becomes_of_a_value(tmp_path, capsys, code):
    """Code as in public scripts, in a file, because its lines are parsed."""
    file, body = tmp_path / "script.py", "".join(f"    {part}\n" for part in code.split("; "))
    head = "".join(map(inspect.getsource, (Env, select, trained))) + "env = Env()\nrows = torch.tensor([[0, 0]])\n"
    options = "table=torch.zeros(4), seen=[0.0], losses=[], total=0.0, best=9.0, step=1"
    file.write_text(
        f"import logging, sys, torch\nlog = logging.getLogger('x')\n{head}def step(loss, device, {options}):\n{body}"
    )
    made: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), made)
    device = simgpu()
    loss = torch.ones((1, 1) if "loss[" in code else (), device=device)
    with cuda_is_pretended():
        (fix, *_) = named(lambda: made["step"](loss, device)).values()
    texts = {name: text for name, text in vars(remedies).items() if isinstance(text, str)}
    texts |= {"HOST_DATA": HOST_DATA.remedy, "": UPLOAD.remedy, "MADE": remedies.ON_DEVICE.format("zeros")}
    summed = {texts["SUMMED"].format(kept) for kept in ("loss.detach()", "the tensor")}
    assert fix in (summed if USES[code] == "SUMMED" else {texts[USES[code]]})


def test_a_wait_for_a_clock(tmp_path):
    file = tmp_path / "script.py"
    file.write_text("torch.cuda.synchronize()\nnow = time.time()\nx = 1\ntorch.cuda.synchronize()\n")
    rows = (LedgerRow("sync", "synchronize", Place(Site(str(file), line, "step", "", line))) for line in (1, 4))
    assert [*map(remedies.of_read, rows)] == [remedies.CLOCKED, WAIT.remedy]


def test_a_batch_of_a_loader_is_pinned_there():
    loader = torch.utils.data.DataLoader(torch.ones(4, 3), batch_size=2)

    def step():
        for x in loader:
            x.to(simgpu())
        torch.ones(2).to(simgpu())

    fixes = named(step)
    assert fixes.pop("x.to(simgpu())") == remedies.PINNED and remedies.PINNED not in fixes.values() and len(fixes) == 1


class Environment:
    def step(self, action):
        return action


def test_an_action_for_an_environment_cannot_be_read_later():
    scores, env, optimizer = torch.ones(3, device=simgpu()), Environment(), Environment()

    def step():
        env.step(scores.argmax().item())
        action = scores.cpu().numpy()
        env.step(action)
        loss = scores.mean().item()
        optimizer.step(loss)
        return loss

    acted = [code for code, fix in named(step).items() if fix == remedies.ACTED]
    assert sorted(acted) == ["action = scores.cpu().numpy()", "env.step(scores.argmax().item())"]


def test_an_index_that_is_counted_up_on_the_host():
    x = torch.ones(3, 2, device=simgpu(), requires_grad=True)
    index = torch.zeros(3, dtype=torch.long).to(simgpu())

    def step():
        x[torch.arange(len(x)), index].sum().backward()

    with watch(device=simgpu()) as ledger:
        for _ in range(2):
            step()
            ledger.step()
    (found,) = diagnose(Measurements("train.py", "pretend", ledger.rows, ledger.steps, ledger.counted)).findings
    assert (found.fix, found.count) == (remedies.ON_DEVICE.format("arange"), 2), "forward and backward"
    assert not named(lambda: x[torch.arange(len(x), device=x.device), index].sum().backward()), "the advice leaves no copy"


def test_what_a_line_makes_on_the_host():
    device, reward = simgpu(), np.ones(3)

    def step():
        explore = torch.rand((4,)).to(device)
        rewards = torch.tensor(reward).to(device)
        scale = torch.tensor([1.0, 2.0]).to(device)
        return explore, rewards, scale

    random, built, constant = (fix for _, fix in sorted(named(step).items()))
    assert (random, built) == (remedies.ON_DEVICE.format("rand"), remedies.STAGED)
    assert constant == HOST_DATA.remedy, "what is the same in each step is made once"
    assert not named(lambda: torch.rand((4,), device=device)), "the advice leaves no copy"


def test_a_result_that_is_read_does_not_come_up_again():
    device, model, x = simgpu(), nn.Linear(2, 2).to(simgpu()), torch.ones(1, 2)
    back = torch.ones(2, device=device)

    def step():
        model((x + 1).to(device)).detach().cpu()
        model((x + 2).to(device)).detach().to("cpu")
        back.cpu().clamp(max=0.5).to(device)

    *read, trip = (fix for _, fix in sorted(named(step).items(), key=lambda each: each[0].startswith("back")))
    assert read == [RESULT, RESULT] and trip == ROUND_TRIP


def test_elements_that_are_read_one_by_one():
    words, ids = "abcdefghij", torch.arange(10).to(simgpu())

    def one_by_one():
        return "".join(words[int(i)] for i in ids)

    def at_once():
        return "".join(words[i] for i in ids.tolist())

    assert list(named(one_by_one).values()) == [remedies.AT_ONCE]
    assert remedies.AT_ONCE not in named(at_once).values(), "one copy is left"


def test_a_sum_and_what_is_shown_rarely(capsys):
    loss, counter = torch.ones((), device=simgpu()), iter(range(9))

    def step(total=0.0):
        total += loss.item()
        if next(counter) % 4 == 0:
            print(loss.item())
        return total

    with watch(device=simgpu()) as ledger:
        for _ in range(4):
            step()
            ledger.step()
    verdict = diagnose(Measurements("train.py", "pretend", ledger.rows, ledger.steps, ledger.counted))
    assert [finding.fix for finding in verdict.findings] == [remedies.SUMMED.format("loss.detach()")]
    assert [finding.fix for finding in verdict.harmless] == [remedies.RARE]


def test_an_index_of_numpy_is_copied_each_time():
    x, index = torch.arange(4.0, device=simgpu()), np.array([2, 1])

    def step():
        y = x[index]
        z = x.square()[index]
        return y + z

    with watch(device=simgpu()) as ledger:
        for _ in range(2):
            step()
            ledger.step()
    (one,) = diagnose(Measurements("train.py", "pretend", ledger.rows, ledger.steps, ledger.counted)).findings
    lines = sorted({stall.place.site.line for stall in ledger.rows if stall.kind == "h2d"})
    assert (one.kind, one.count, one.fix, len(lines)) == ("h2d", 2, remedies.INDEX, 2), "one cause, one finding"
    assert all(str(line) in one.evidence for line in lines)
    device_index = torch.as_tensor(index, device=simgpu())
    assert not named(lambda: x[device_index].sum()), "the advice leaves no copy"


@pytest.mark.parametrize("library", remedies.LIBRARIES)
def test_every_library_is_recognised_by_its_path(library):
    file = f"{library}file.py" if library.endswith("/") else library
    stall = row("sync", "item", at(7, "step()", via="x"))
    via = stall.place.via
    place = type(stall.place)(stall.place.site, type(via)(f"/venv/lib/site-packages/{file}", 3, "f", "x", 3))
    (finding,) = diagnose(seen(None, row("sync", "item", place))).findings
    assert finding.fix == remedies.LIBRARIES[library]
    rare = diagnose(seen(None, row("sync", "item", place, 0.25), row("d2h", "copy to host", place, 0.25, "pageable, blocking")))
    already = remedies.RARE if "every n steps" in finding.fix else finding.fix
    assert {each.fix for each in [*rare.findings, *rare.harmless]} == {already}, "a line that logs rarely has nothing to change"
    mine = type(stall.place)(stall.place.site, type(via)(f"/home/my{file}", 3, "f", "x", 3))
    (other,) = diagnose(seen(None, row("sync", "item", mine))).findings
    assert other.fix != finding.fix, "a file of another name is not the library's"


def test_a_list_as_an_index_and_the_lengths_of_packed_sequences():
    device = simgpu()
    x, y, lengths = torch.ones(2, 3, device=device), torch.ones(2, 3, 1, device=device), torch.tensor([2, 3]).to(device)

    def step():
        x[x < x[:, [-1]]] = -1.0
        pack_padded_sequence(y, lengths.cpu(), batch_first=True, enforce_sorted=False)

    assert list(named(step).values()) == [remedies.LIBRARIES["torch/nn/utils/rnn.py"], remedies.SLICE]
    host = lengths.cpu()
    packed = named(lambda: (x[:, -1:], pack_padded_sequence(y, host.flip(0), batch_first=True)))
    assert not packed, "the advice leaves no copy"


def test_a_clone_inside_a_library_is_not_the_user_s_to_leave_out():
    stall = row("clone", "clone", at(7, "scaler.step(optimizer)"))
    via = at(7, via="amp/grad_scaler.py")
    assert diagnose(seen(None, stall)).findings and not diagnose(seen(None, row("clone", "clone", via))).findings


def test_what_a_value_decides_keeps_the_general_advice():
    general = diagnose(seen(None, row("sync", "item", at(7, "if loss.item() > best:")))).findings[0].fix
    assert general not in (remedies.RARELY, remedies.LATER)
    masked = diagnose(seen(None, row("sync", "boolean mask", at(7, "print(x[mask])")))).findings[0].fix
    assert masked != remedies.RARELY, "a mask waits for a size"
    for code in ("x[step] = batch", "y = torch.log(x[1])", "y = x[rows].to(device)", "y = x[1:2]"):
        copied = diagnose(seen(None, row("h2d", "copy to device", at(7, code), detail="pageable, blocking"))).findings[0].fix
        assert copied != remedies.INDEX, code


def test_cpu_work_on_the_line_of_a_copy_is_part_of_it():
    device = simgpu()
    with watch(device=device) as ledger:
        for _ in range(2):
            torch.tensor([1.0, 2.0]).double().to(device).sum()
            (torch.ones(2) + 1).tolist()  # a few numbers
            (torch.ones(99) * 2).tolist()
            ledger.step()
    verdict = diagnose(Measurements("train.py", "pretend", ledger.rows, ledger.steps, ledger.counted))
    assert [(finding.kind, finding.site.code) for finding in verdict.findings] == [
        ("h2d", "torch.tensor([1.0, 2.0]).double().to(device).sum()"),
        ("cpu_op", "(torch.ones(99) * 2).tolist()"),
    ]
