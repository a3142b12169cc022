"""`gpubound doctor --fix --prove`: the script runs as it is and patched, on the pretend device, and its losses decide."""

import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gpubound.cli import main
from gpubound.doctor.fix import prove
from gpubound.watch.pretend import simgpu
from tests.messages import message

READS = """\
import torch
device = torch.accelerator.current_accelerator()
weight = torch.nn.Parameter(torch.rand(3).to(device))
optimizer = torch.optim.SGD([weight], lr=0.1)
total = 0.0
for step in range(1000):
    loss = (weight * torch.rand(3, device=device)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
print(total)
"""

# A parameter that gets no gradient after the first step: zeros let its decay go on, None ends it.
DECAYS = """\
import torch
from torch.profiler import record_function
device = torch.accelerator.current_accelerator()
model = torch.nn.ParameterList([torch.ones(2), torch.ones(2)]).to(device)
for step in range(1000):
    loss = model[0].sum() + (model[1] if step == 0 else model[1].detach()).sum()
    model.zero_grad(set_to_none=False)
    loss.backward()
    with record_function("update"), torch.no_grad():
        for weight in model:
            if weight.grad is not None:
                weight -= 0.1 * (weight.grad + 0.1 * weight)
"""


def _seeded(folder: str, output: str, arguments: list[str]) -> None:
    os.chdir(folder)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    try:
        code = prove.main(arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A folder to work in. Runs are forked from a server, 0.2 s instead of the 4 of a new interpreter."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])

    def forked(command: list[str], **options) -> CompletedProcess:
        assert command[:3] == [sys.executable, "-m", "gpubound.doctor.fix.prove"]
        process = context.Process(target=_seeded, args=(str(tmp_path), str(tmp_path / "said"), command[3:]))
        process.start()
        process.join(120)
        return CompletedProcess(command, process.exitcode, "", (tmp_path / "said").read_text())

    monkeypatch.setattr("subprocess.run", forked)
    monkeypatch.chdir(tmp_path)
    simgpu()
    return tmp_path / "train.py"


def proved(script: Path, text: str, *options: str) -> int:
    script.write_text(text)
    return main(["doctor", "--dry-run", "--fix", "--apply", "--prove", "3", *options, "train.py"])


def test_the_same_losses_let_the_patch_be_written(script, capsys):
    assert proved(script, READS) == 0
    said = capsys.readouterr().out
    assert message("cli_doctor_prove:the_same_losses_let_the").within(said)
    assert "patched: train.py" in said and message("cli_doctor_prove:the_same_losses_let_the.2").within(said)
    assert script.read_text() == READS.replace("loss.item()", "loss.detach().to(torch.float64, copy=True)").replace(
        "print(total)", "print(float(total))"
    )
    assert message("cli_doctor_prove:the_same_losses_let_the.3").within((script.parent / ".doctor/doctor.html").read_text())


def test_other_losses_are_a_failure_and_nothing_is_written(script, capsys):
    assert proved(script, DECAYS, "--step-marker", "update") == 1
    said = capsys.readouterr().out
    assert "+    model.zero_grad()" in said and message("cli_doctor_prove:other_losses_are_a_failu").within(said)
    assert message("cli_doctor_prove:other_losses_are_a_failu.2").within(said) and script.read_text() == DECAYS
