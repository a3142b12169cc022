"""`gpubound doctor`: a script on the pretend device, a trace, and what cannot be looked at."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import gpubound as gb
from gpubound.cli import main
from gpubound.cli.doctor import split
from gpubound.doctor.report.files import JSON
from gpubound.watch.pretend import simgpu
from tests.messages import message

LOOP = """
    import sys
    import torch
    from torch import nn

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    count = int(sys.argv[1])
    try:
        for step in range(count):
            loss = model(torch.ones(4, 8, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            print("private", loss.item())
    finally:
        print("closed after", step + 1)
"""

CHOICE = 'device = torch.accelerator.current_accelerator() or torch.device("cpu")'


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    simgpu()
    path = tmp_path / "train.py"
    path.write_text(dedent(LOOP))
    return path


def test_a_dry_run_names_the_line_and_stops_the_script(script, capsys):
    assert main(["doctor", "--dry-run", "train.py", "100"]) == 0
    screen = capsys.readouterr().out
    assert "closed after 21\n" in screen
    assert message("cli_doctor:a_dry_run_names_the_line").within(screen) and "written: .doctor/doctor.json" in screen
    assert screen.count("prices need a GPU") == 1
    written = (script.parent / ".doctor" / JSON).read_text()
    (finding,) = json.loads(written)["findings"]
    assert (finding["kind"], finding["file"], finding["line"], finding["count"], finding["ms"]) == (
        "sync",
        "train.py",
        15,
        1,
        None,
    )
    for path in (script.parent / ".doctor").iterdir():
        assert str(script.parent) not in path.read_text() and str(Path.home()) + "/" not in path.read_text()


def test_json_stands_alone_on_stdout_and_writes_nothing(script, capsys):
    assert main(["doctor", "--json", "--dry-run", "--keep-going", "train.py", "5"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["findings"][0]["line"] == 15 and "closed after 5" in err
    assert not (script.parent / ".doctor").exists()


def test_json_stands_alone_whoever_prints(script, capfd):
    """A child and a C library print to the stream's number."""
    script.write_text("import os\nos.system('echo child')\nos.write(1, b'raw\\n')\n" + script.read_text())
    assert main(["doctor", "--json", "--dry-run", "train.py", "9"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["findings"] and "child\nraw\n" in err


@pytest.mark.parametrize("asked, coloured", [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_for_who_wants_them(script, capsys, monkeypatch, asked, coloured):
    for name, value in ({"TERM": "xterm", "NO_COLOR": ""} | asked).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["doctor", "--dry-run", "train.py", "9"]) == 0
    assert ("\x1b[" in capsys.readouterr().out) == coloured


def test_a_module_is_run(script, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))
    script.rename(script.parent / "looped_module.py")
    assert main(["doctor", "--dry-run", "-m", "looped_module", "100"]) == 0
    screen = capsys.readouterr().out
    assert "closed after 21" in screen and "looped_module.py:15" in screen


@pytest.mark.parametrize(
    "options, code, said",
    [
        (["--max-syncs-per-step", "1"], 0, "ok: --max-syncs-per-step: 1, allowed 1"),
        (["--max-syncs-per-step", "0"], 1, "FAILED: --max-syncs-per-step: 1, allowed 0"),
        (["--max-idle-pct", "50"], 3, "NOT MEASURED: --max-idle-pct"),
        (["--max-syncs-per-step", "0", "--allow", "allow.toml"], 0, "ok: --max-syncs-per-step: 0, allowed 0"),
    ],
)
def test_the_gate_is_never_green_by_absence(script, capsys, options, code, said):
    code_of_line = 'print("private", loss.item())'
    entry = f"""[[allow]]\nkind = "sync"\nfile = "train.py"\ncode = '{code_of_line}'\nwhy = "a test"\n"""
    (script.parent / "allow.toml").write_text(entry)
    assert main(["doctor", "--dry-run", *options, "train.py", "9"]) == code
    assert said in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pretend device needs CUDA_VISIBLE_DEVICES=")
def test_a_script_that_took_the_cpu_is_not_measured_and_not_blamed(script, capsys):
    """It has 0 waits, which would hold every budget, and its ops on the CPU are no fault of its lines."""
    script.write_text(script.read_text().replace(CHOICE, 'device = torch.device("cpu")'))
    assert main(["doctor", "--dry-run", "--max-syncs-per-step", "0", "train.py", "9"]) == 3
    printed = capsys.readouterr()
    assert "model.to(device)" not in printed.out + printed.err and "cpu_op" not in printed.out
    assert "reached the device" in printed.err.splitlines()[-1]


def test_a_function_on_the_cpu_is_not_measured():
    with pytest.raises(gb.errors.MeasureError, match="reached the device"):
        gb.doctor(lambda: torch.ones(2).sum().item(), dry_run=True)


FOR_CUDA = {
    "chosen": 'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")',
    "demanded": 'device = "cuda:0"; torch.cuda.set_device(0); assert torch.ones(1).cuda().is_cuda',
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pretend device needs CUDA_VISIBLE_DEVICES=")
@pytest.mark.parametrize("choice", FOR_CUDA)
def test_a_script_for_cuda_runs_on_the_pretend_device(script, capsys, choice):
    script.write_text(script.read_text().replace(CHOICE, FOR_CUDA[choice]))
    assert main(["doctor", "--dry-run", "--json", "train.py", "9"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert [(found["kind"], found["site"]["code"]) for found in verdict["findings"]] == [
        ("sync", 'print("private", loss.item())')
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pretend device needs CUDA_VISIBLE_DEVICES=")
@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        ("torch.cuda.CUDAGraph()", "CUDA graphs"),
        (
            "torch.ops.aten._cudnn_rnn_flatten_weight([torch.ones(2).cuda()], 1, 1, 0, 1, 0, 1, False, False)",
            "aten::_cudnn_rnn",
        ),
    ],
)
def test_what_the_pretend_device_lacks_is_named(script, capsys, statement, missing):
    script.write_text(f"import torch\n{statement}\n")
    assert main(["doctor", "--dry-run", "train.py"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "train.py failed with code 1" in last and f"the pretend device of a dry run has no {missing}" in last


def test_a_patch_is_shown_and_written_only_when_asked_for(script, capsys):
    text = script.read_text().replace('print("private", loss.item())', "total += loss.item()")
    text = text.replace("try:", "total = 0.0\ntry:")
    script.write_text(text)
    assert main(["doctor", "--dry-run", "--fix", "train.py", "9"]) == 0
    assert "sync at train.py:16: reads: " in (shown := capsys.readouterr().out)
    assert message("cli_doctor:a_patch_is_shown_and_wri").within(shown) and script.read_text() == text
    assert main(["doctor", "--dry-run", "--fix", "--apply", "train.py", "9"]) == 0
    assert "patched: train.py" in capsys.readouterr().out and "loss.item()" not in script.read_text()


def test_a_patch_that_cannot_be_written_costs_no_verdict(script, capsys, monkeypatch):
    script.write_text(text := script.read_text().replace('print("private", loss.item())', "last = loss.item()"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    options = ["--fix", "--apply", "--max-syncs-per-step", "1"]
    assert main(["doctor", "--dry-run", *options, "train.py", "9"]) == 2
    said = capsys.readouterr().out
    assert message("cli_doctor:a_patch_that_cannot_be_w").within(said) and "ok: --max-syncs-per-step: 1, allowed 1" in said
    assert "--apply: nothing was written: " in said and "is read-only" in said and script.read_text() == text


def test_a_trace_is_judged(tmp_path, capsys):
    events = []

    def event(category, name, start, took, thread, **args):
        known = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "ts": start, "dur": took}
        events.append(known | {"args": args})

    for step in range(4):
        at = 550.0 * step
        for start, took in ((at, 400.0), (at + 440, 100.0)):
            number = len(events) + 1
            event("cuda_runtime", "cudaLaunchKernel", start, 5.0, 1, correlation=number)
            event("kernel", "gemm", start + 6, took, 7, correlation=number, device=0, stream=7)
        event("cuda_runtime", "cudaStreamSynchronize", at + 10, 400.0, 1, correlation=0)
        event("user_annotation", f"ProfilerStep#{step}", at, 550.0, 1)
    path = tmp_path / "mailed.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert main(["doctor", "--json", str(path)]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["script"] == "mailed.json" and verdict["absent"]["lines"] == "a trace has none"
    assert verdict["step_ms"] == pytest.approx(0.55, rel=1e-3) and verdict["bar"]["shares"]["busy"] == pytest.approx(
        100 * 500 / 550, abs=0.1
    )


def test_a_function_is_called_until_enough_was_seen():
    x = torch.ones(4, device=simgpu())
    verdict = gb.doctor(lambda: x.sum().item(), dry_run=True)
    (finding,) = verdict.findings
    assert (finding.kind, finding.count, finding.site.file) == ("sync", 1, __file__)
    with pytest.raises(ValueError, check=message("cli_doctor:a_function_is_called_unt")):
        gb.doctor(3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_without_a_gpu_it_could_not_measure(script, capsys):
    assert main(["doctor", "train.py", "5"]) == 3
    assert "put --dry-run before the script" in capsys.readouterr().err
    with pytest.raises(gb.errors.MeasureError, match="pass dry_run=True") as error:
        gb.doctor(print)
    assert "--" not in str(error.value)


@pytest.mark.parametrize(
    "argv, code, text",
    [
        (["train.py", "0"], 2, message("cli_doctor:failed")),
        (["train.py", "1"], 3, message("cli_doctor:too_few_steps")),
        (["idle.py"], 3, message("cli_doctor:no_step")),
        (["--step-marker", "batch", "idle.py"], 3, message("cli_doctor:no_marker")),
        (["--timed", "0", "train.py"], 2, message("cli_doctor:wrong_timed")),
        ([], 2, message("cli_doctor:no_script")),
        (["--apply", "train.py"], 2, message("cli_doctor:no_fix")),
        (["--fix", "--prove", "2", "train.py"], 2, message("cli_doctor:wrong_rounds")),
        (["none.json", "x"], 2, message("cli_doctor:wrong_trace")),
        (["none.py"], 2, message("cli_doctor:no_file")),
        (["."], 2, message("cli_doctor:no_main")),
    ],
)
def test_what_cannot_be_looked_at_is_one_sentence(script, capsys, argv, code, text):
    (script.parent / "idle.py").write_text("pass")
    assert main(["doctor", "--dry-run", *argv]) == code
    assert capsys.readouterr().err.splitlines()[-1] == text


def test_what_follows_the_script_is_its_own():
    own = ["--dry-run", "--timed", "5"]
    assert split([*own, "train.py", "--timed", "7"]) == (own, "train.py", ["--timed", "7"], False, False)
    assert split(["-o", "x", "--json", "-m", "a.b", "-m"]) == (["-o", "x", "--json"], "a.b", ["-m"], True, False)
    assert split(["--timed=5", "--", "-odd.py"]) == (["--timed=5"], "-odd.py", [], False, True)
    assert split(["--", "-m", "a.b", "--fix"]) == ([], "a.b", ["--fix"], True, True)


@pytest.mark.parametrize("option", ["--dry-run", "--dry_run", "--max-syncs-per-step=0", "--fix", "--baseline"])
@pytest.mark.parametrize("module", [False, True])
def test_an_option_after_the_script_is_refused_unless_the_script_names_it(script, capsys, option, module):
    target = ["-m", "train"] if module else ["train.py"]
    assert main(["doctor", "--dry-run", *target, "9", option]) == 2
    said = capsys.readouterr()
    name = option.partition("=")[0].replace("_", "-")
    assert "private" not in said.out and f"put {name} before the script" in said.err


@pytest.mark.parametrize(("own", "before"), [(True, []), (False, ["--"])], ids=["its-own", "separated"])
def test_the_scripts_own_options_are_left_alone(script, capsys, own, before):
    if own:
        script.write_text(script.read_text() + "# --dry-run\n")
    assert main(["doctor", "--dry-run", *before, "train.py", "9", "--dry-run", "--out", "x"]) == 0
    assert "closed after 9" in capsys.readouterr().out


def test_progress_is_a_line_for_each_phase(script, capsys):
    assert main(["doctor", "--dry-run", "--keep-going", "train.py", "40"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gpubound doctor: ")]
    assert len(lines) == 3 and "train.py" in lines[0]
    assert "warm-up 1/1" in lines[1] and "located 20/20" in lines[2] and lines[2].endswith("s a step")


def test_reports_that_cannot_be_written_cost_no_verdict(script, capsys, monkeypatch):
    (script.parent / "taken").write_text("")
    assert main(["doctor", "--dry-run", "--out", "taken", "train.py", "100"]) == 2
    said = capsys.readouterr()
    assert said.err.endswith("gpubound doctor: out: taken is a file; give a folder with --out.\n") and "private" not in said.out

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(import_module("gpubound.doctor.report"), "write_reports", full)
    assert main(["doctor", "--dry-run", "--max-syncs-per-step", "0", "train.py", "100"]) == 2
    said = capsys.readouterr()
    assert "sync, 1 a step, counted" in said.out and "FAILED: --max-syncs-per-step: 1, allowed 0" in said.out
    assert said.err.endswith(
        "gpubound doctor: out: the reports could not be written to .doctor: [Errno 28] No space left on device; give another "
        "--out.\n"
    )
