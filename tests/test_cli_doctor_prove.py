"""`gpubound doctor --fix --prove`: the script runs as it is and patched, on the pretend device, and its losses decide."""

from pathlib import Path

import pytest

from gpubound.cli import main
from gpubound.doctor.fix import prove
from gpubound.doctor.record.script import StopScript
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


def run_here(job: prove.SeededJob, side: str, folder: Path, ranks: int) -> prove.SeededRun:
    """Run the job in this process, until its last step."""

    def stop():
        raise StopScript

    recorder = prove.Recorder(job.steps, stop)
    prove.run(job, recorder)
    return prove.read_run(recorder.as_dict(), job.warmup)


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(prove, "run_once", run_here)
    monkeypatch.chdir(tmp_path)
    simgpu()
    return tmp_path / "train.py"


def proved(script: Path, text: str, *options: str) -> int:
    script.write_text(text)
    return main(["doctor", "--dry-run", "--fix", "--apply", "--prove", "3", *options, "train.py"])


@pytest.mark.slow
def test_the_same_losses_let_the_patch_be_written(script, capsys):
    assert proved(script, READS) == 0
    said = capsys.readouterr().out
    assert message("cli_doctor_prove:the_same_losses_let_the").within(said)
    assert "patched: train.py" in said and message("cli_doctor_prove:the_same_losses_let_the.2").within(said)
    assert script.read_text() == READS.replace("loss.item()", "loss.detach().to(torch.float64, copy=True)").replace(
        "print(total)", "print(float(total))"
    )
    assert message("cli_doctor_prove:the_same_losses_let_the.3").within((script.parent / ".doctor/doctor.html").read_text())


@pytest.mark.slow
def test_other_losses_are_a_failure_and_nothing_is_written(script, capsys):
    assert proved(script, DECAYS, "--step-marker", "update") == 1
    said = capsys.readouterr().out
    assert "+    model.zero_grad()" in said and message("cli_doctor_prove:other_losses_are_a_failu").within(said)
    assert message("cli_doctor_prove:other_losses_are_a_failu.2").within(said) and script.read_text() == DECAYS
