"""What a command line names for the audit of readiness, and the step of a decoder."""

import json

import pytest
import torch

from gpubound import cli
from gpubound.cli.doctor_actions import audit_decoding, audits, call_named
from gpubound.decode import decoder
from gpubound.models import Decoder, DecoderConfig
from tests.models.deepseek_v4.decode.cases import CSA, HCA, build

PROGRAM = """\
import torch

kept = torch.zeros(3)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) * x.max().item()

    def example_inputs(self):
        return (torch.randn(3, 4),)


def build():
    return torch.nn.Linear(4, 4), torch.randn(3, 4)


def step():
    kept.add_(1)


def broken():
    raise KeyError("weights")
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["doctor", "--device", "cpu", "--graph-ready", *argv])
    return code, *capsys.readouterr()


def test_a_class_is_audited_with_its_own_inputs(program, capsys):
    code, said, _ = run(capsys, f"{program}:Net")
    assert code == 1 and "program.py:12 reads the device from the host" in said


def test_nothing_found_without_a_gpu_exits_3_and_says_less(program, capsys):
    code, said, _ = run(capsys, f"{program}:build", "--json")
    (audit,) = json.loads(said)["audits"]
    assert (code, audit["ready"], audit["captured"], audit["name"]) == (3, True, False, "Linear")


def test_a_function_that_gives_no_callable_is_the_step_itself(program):
    step = call_named(f"{program}:step")
    assert step.__name__ == "step" and step() is None


@pytest.mark.parametrize("name", ["json", "configured_model"])
def test_a_file_may_hold_dataclasses_and_be_called_as_another_module(tmp_path, name):
    """A dataclass whose annotations are texts looks its module up."""
    path = tmp_path / f"{name}.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Config:\n    width: int = 8\n"
        "def build():\n    import json\n    return (lambda: json.dumps(Config().width)),\n"
    )
    (made,) = call_named(f"{path}:build")
    assert made() == "8"


@pytest.mark.parametrize("code", [0, 3])
def test_a_target_that_ends_the_process_is_told(tmp_path, code):
    """Code 0 would say that a graph holds all of it, code 3 that nothing was found."""
    (tmp_path / "ends.py").write_text(f"raise SystemExit({code})")
    with pytest.raises(ValueError, match=rf"ends\.py:build raised SystemExit: {code}$"):
        call_named(f"{tmp_path / 'ends.py'}:build")


def test_a_bad_name_is_told(program, capsys):
    code, out, said = run(capsys, "nothing")
    assert (code, out) == (2, "") and "'nothing'" in said and "FILE.py:NAME" in said
    code, _, said = run(capsys, f"{program}:broken")
    assert code == 2 and f"{program}:broken raised KeyError: 'weights'" in said


@pytest.fixture
def made(monkeypatch):
    """A decoder of a small DeepSeek-V4, computed by the references: the interpreter would take a minute for its kernels."""
    monkeypatch.setattr("gpubound.kernels.dispatch.can_launch", lambda device: False)
    model = build(num_hidden_layers=2, layer_types=[HCA, CSA], mlp_layer_types=["hash_moe", "moe"])
    return decoder(model, max_length=48, verify=False)


@pytest.mark.slow
def test_a_step_of_our_decoder_of_deepseek_is_ready_until_a_read_is_planted(made, monkeypatch):
    """Its replays pass the ends of a window of 12 and of stretches of 4 and 8."""
    found = audit_decoding(made, prompt=7, steps=6)
    assert found.ready, str(found)
    (part,) = found.parts
    assert "6 rounds of replay" in part.certificate
    assert "1 output and" in part.certificate and "mutated tensors compared" in part.certificate

    step = made.body.step

    def reading(token, position):
        return step(token, position) * float(position.max().item() >= 0)

    monkeypatch.setattr(made.body, "step", reading)
    found = audit_decoding(made, prompt=7, steps=2)
    assert not found.ready and "position.max().item()" in str(found)


def test_on_a_cpu_the_step_that_a_gpu_would_capture_is_audited(monkeypatch):
    """A CPU has a way of its own, which reads how far the rows are: no reason against a graph."""
    for name in ("gpubound.kernels.dispatch.can_launch", "gpubound.decode.cpu_step.can_launch"):
        monkeypatch.setattr(name, lambda device: False)
    _, ours = audits(Decoder(DecoderConfig(32, 64, layers=1, heads=2, kv_heads=1, vocabulary=64)), torch.device("cpu"))
    assert ours.ready, str(ours)


@pytest.mark.gpu
def test_on_a_gpu_each_is_captured(program, capsys):
    assert cli.main(["doctor", "--graph-ready", f"{program}:build"]) == 0
    assert "READY: one graph" in capsys.readouterr().out
    assert cli.main(["doctor", "--graph-ready", f"{program}:Net"]) == 1
    found = audit_decoding(decoder(build(dtype=torch.bfloat16, device="cuda"), max_length=48, verify=False), prompt=7)
    assert found.captured and found.ready, str(found)
