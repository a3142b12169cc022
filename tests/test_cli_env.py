"""The street door by its exact output: the dispatcher, `env`, `bench`, completion, and answers before torch is imported."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from gpubound import cli, device, measure
from gpubound.cli import bench
from gpubound.errors import BudgetError, DeviceError, MeasureError
from gpubound.measure import Ceilings, Machine, ceiling
from gpubound.measure.ceiling import Gpu
from gpubound.version import __version__
from tests.messages import message

HERE = Path(cli.__file__).parent
MACHINE = Machine("Linux 6.1 x86_64", "3.12.3", "2.11.0+cu130", "13.0", "580.95.05", "3.6.0", "Xeon", 16, 128 << 30)
H200 = Gpu(0, "NVIDIA H200", "9.0", 140 << 30, 60 << 20, 132)
CEILINGS = Ceilings(
    device="cuda",
    name="NVIDIA H200",
    key="nvidia-h200",
    date="2026-11-21T10:00:00+00:00",
    quick=False,
    copy_bytes_per_s=4.28e12,
    read_bytes_per_s=4.495e12,
    fp32_flops_per_s=51.2e12,
    bf16_flops_per_s=790.4e12,
    launch_us=8.04,
    pinned_h2d_bytes_per_s=55.49e9,
    pageable_h2d_bytes_per_s=9.126e9,
    missing={"fp8_flops_per_s": "fp8 products need compute capability 8.9 or later"},
)


@pytest.fixture
def run(capsys):
    """run(*argv) -> (exit code, stdout, stderr)"""

    def call(*argv):
        code = cli.main(argv)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def h200(monkeypatch):
    """A machine with one GPU that passes its test."""
    monkeypatch.setattr(measure, "machine", lambda: MACHINE)
    monkeypatch.setattr(measure, "gpus", lambda: [H200])
    monkeypatch.setattr(measure, "ceilings", lambda device, refresh: CEILINGS)
    monkeypatch.setattr(device, "resolve", lambda spec: torch.device("cuda", 0))
    monkeypatch.setattr(device, "label", lambda device: f"NVIDIA H200 ({device})")
    monkeypatch.setattr(device, "look", lambda: env_sight(1))


def env_sight(count, why="1 visible"):
    return device.Sight(count, why)


# --- the dispatcher ---


def test_help_lists_the_commands_that_exist(run, monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", {name: cli.COMMANDS[name] for name in ("env", "bench")})
    assert run() == run("--help") == run("help") == (0, message("cli_env:help"), "")


def test_every_listed_command_exists_whole():
    for name in cli.COMMANDS:
        module = import_module(f"gpubound.cli.{name}")
        assert callable(module.main) and module.__doc__.strip(), name
    commands = {p.stem for p in HERE.glob("*.py") if "\ndef main(argv: " in p.read_text()} - {"__init__"}
    assert commands == set(cli.COMMANDS), "a command without a line in COMMANDS"


def test_python_m_gpubound():
    done = subprocess.run([sys.executable, "-m", "gpubound", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"gpubound {__version__}\n")


def test_an_unknown_command_suggests_the_near_one(run, monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", {name: cli.COMMANDS[name] for name in ("env", "bench")})
    assert run("evn") == (2, "", message("cli_env:an_unknown_command_sugge"))
    assert run("fly") == (2, "", message("cli_env:an_unknown_command_sugge.2"))


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("batch: got 0,\n  wanted 1 or more."), 2, "gpubound train: batch: got 0, wanted 1 or more.\n"),
        (DeviceError("GPU 0 is visible but does not work."), 2, "gpubound train: GPU 0 is visible but does not work.\n"),
        (MeasureError("no kernel was seen."), 3, "gpubound train: no kernel was seen.\n"),
        (BudgetError("1 sync, 0 allowed."), 1, "gpubound train: 1 sync, 0 allowed.\n"),
        (FileNotFoundError(2, "No such file", "run.yaml"), 2, "gpubound train: [Errno 2] No such file: 'run.yaml'\n"),
        (BrokenPipeError(32, "Broken pipe"), 2, "gpubound train: [Errno 32] Broken pipe\n"),  # a worker's, not stdout
        (OSError(errno.ENOSPC, "No space left on device"), 2, message("cli_env:no_room", "No space left on device")),
        (OSError(errno.EFBIG, "File too large"), 2, message("cli_env:no_room", "File too large")),
        (OSError(errno.ENOSPC, "Full", "a.html"), 2, message("cli_env:no_room_for_file")),
        (KeyboardInterrupt(), 130, "gpubound: interrupted\n"),
        (SystemExit(0), 0, ""),
        (SystemExit(2), 2, ""),
        (SystemExit(), 0, ""),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else None,
)
def test_errors_become_one_line_and_an_exit_code(capsys, monkeypatch, error, code, said):
    monkeypatch.delenv("GPUBOUND_TRACEBACK", raising=False)

    def command(argv):
        raise error

    assert cli.guarded("train", command, []) == code
    assert capsys.readouterr() == ("", said)


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error():
    """As in `| head`: no complaint, and the code that a shell gives for a closed pipe."""
    called = [sys.executable, "-m", "gpubound", "train", "--list"]
    with subprocess.Popen(called, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, b"")


def test_a_name_in_a_sentence_does_not_steer_the_terminal(run):
    """And half a surrogate pair, which is what a file name that is no UTF-8 becomes, can be printed."""
    said = run("report", "a\x1b[2J\udcff")[2]
    assert said.startswith("gpubound report: a\\x1b[2J\\udcff is not a run: ")
    assert run("a\x1b[2J")[2].startswith("gpubound: there is no command ")


def test_a_closed_stdout_is_no_error():
    """As in `>&-`: Python has no sys.stdout then."""
    called = [sys.executable, "-m", "gpubound", "report", "--help"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *called], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("importing", [False, True])
def test_ctrl_c_while_torch_is_imported_ends_the_process(importing, capfd, monkeypatch):
    """An exception there passes through torch's C++, which aborts."""
    monkeypatch.setattr(torch.__spec__, "_initializing", importing, raising=False)
    monkeypatch.setattr(os, "_exit", lambda code: sys.exit(code))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.guarded("env", lambda argv: signal.raise_signal(signal.SIGINT), []) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr() == ("", "gpubound: interrupted\n")


def test_a_traceback_on_request(capsys, monkeypatch):
    monkeypatch.setenv("GPUBOUND_TRACEBACK", "1")
    assert cli.guarded("train", lambda argv: int("x"), []) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):")
    assert said.endswith("gpubound train: invalid literal for int() with base 10: 'x'\n")


def test_our_own_bugs_keep_their_traceback():
    with pytest.raises(AssertionError):
        cli.guarded("train", lambda argv: exec("assert False"), [])


# --- env ---


def test_env_prints_the_machine_and_its_ceilings(run, h200):
    assert run("env") == (0, message("cli_env:env_prints_the_machine"), "")


def test_env_json(run, h200):
    code, out, _ = run("env", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["machine"]["driver"] == "580.95.05"
    assert found["gpus"][0]["test"] == "passes"
    assert found["policy"] == {
        "asked": "auto",
        "device": "cuda:0",
        "name": "NVIDIA H200 (cuda:0)",
        "why": "it computed a small product forward and backward, and the result agrees with the CPU's",
    }
    assert found["ceilings"] == CEILINGS.as_dict()


def test_env_with_a_gpu_that_fails_is_a_failed_gate(run, h200, monkeypatch):
    def broken(spec):
        raise DeviceError("GPU 0 is visible but does not work: out of memory.")

    monkeypatch.setattr(device, "resolve", broken)
    monkeypatch.setattr(measure, "ceilings", lambda *a, **k: pytest.fail("measured a device that does not work"))
    code, out, _ = run("env")
    assert code == 1 and out.endswith("\ndevice=auto   ERROR: GPU 0 is visible but does not work: out of memory.\n")
    code, out, _ = run("env", "--json")
    assert code == 1 and json.loads(out)["policy"]["device"] is None


def test_env_with_one_gpu_of_two_that_fails(run, h200, monkeypatch):
    def second_broken(spec):
        if spec == "cuda:1":
            raise DeviceError("GPU 1 is visible but does not work: ECC error.")
        return torch.device("cuda", 0)

    monkeypatch.setattr(device, "resolve", second_broken)
    monkeypatch.setattr(measure, "gpus", lambda: [H200, Gpu(1, *list(vars(H200).values())[1:])])
    code, out, _ = run("env", "--json")
    assert code == 1
    assert [gpu["test"] for gpu in json.loads(out)["gpus"]] == ["passes", message("cli_env:env_with_one_gpu_of_two")]


def test_env_on_a_cpu_says_why(run, h200, monkeypatch):
    monkeypatch.setattr(device, "resolve", lambda spec: torch.device("cpu"))
    monkeypatch.setattr(device, "look", lambda: env_sight(0, "torch 2.13.0+cpu is a CPU build"))
    monkeypatch.setattr(device, "label", lambda device: "CPU (2 threads)")
    found = {asked: json.loads(run("env", "--json", "--device", asked)[1]) for asked in ("auto", "cpu")}
    assert found["auto"]["policy"]["why"] == message("cli_env:env_on_a_cpu_says_why") and found["auto"]["gpus"] == []
    assert found["cpu"]["policy"]["why"] == "asked for"


def test_env_of_a_device_that_is_not_there(run):
    code, out, err = run("env", "--device", "cuda:99")
    assert (code, out) == (2, "") and err.startswith("gpubound env: device='cuda:99'")


def test_env_that_cannot_measure(run, h200, monkeypatch):
    def broken(device, refresh):
        raise MeasureError("ceilings: only 40 MiB are free on cuda:0, wanted 256; stop what holds the rest.")

    monkeypatch.setattr(measure, "ceilings", broken)
    assert run("env") == (3, "", message("cli_env:env_that_cannot_measure"))


@pytest.mark.parametrize(("command", "columns"), [*((name, 80) for name in cli.COMMANDS), ("train", 120)])
def test_help_speaks_of_values_in_words(run, command, columns, monkeypatch):
    """An example to copy, N for a whole number, nothing of how Python writes a type, and no line beyond the terminal's."""
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = run(command, "--help")
    lines = [line for line in out.splitlines() if "gpubound" not in line]  # an example is one line, to copy
    assert command == "bench" or max(map(len, lines)) <= columns
    assert (code, err) == (0, "") and f"gpubound {command} " in out.split("usage:")[1].split("\n", 1)[1]
    assert not [raw for raw in ("{None}", "INT", "FLOAT", "STR", "default: None") if raw in out]


def test_an_options_help_is_one_paragraph(run):
    """Its docstring's second line is indented, where tyro would break it."""
    _, out, _ = run("generate", "--help")
    words = " ".join(line.strip("│| ") for line in out.splitlines())
    assert message("cli_env:an_options_help_is_one_p").within(words)
    assert not [line for line in out.splitlines() if line.strip("│| ").startswith("its base is found")]


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (("env", "--jsn"), ("--jsn", "'--json'")),
        (("train", "--modle", "1m"), ("--modle", "'--model'")),
        (("demo", "--steps", "x"), ("--steps", "'x'", "a whole number")),
        (("demo", "--steps"), ("--steps",)),
        (("train", "--betas", "0.9"), ("--betas", "2")),
        (("train", "--resume", "run.yaml"), ("'run.yaml'", "config file")),
        (("init", "other"), ("kind", "'other'", "'lora'")),
        (("generate",), ("CKPT",)),
        (("generate", "one", "two"), ("'two'",)),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_options_are_refused_in_one_line_as_values_are(run, argv, facts, encoding, monkeypatch):
    """Whether tyro draws its frames, or plain rules where stdout is not UTF-8: nothing of them is left."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith(f"gpubound {argv[0]}: ")
    assert not [fact for fact in facts if fact not in err] and err.endswith(f" See gpubound {argv[0]} --help.\n")
    assert not [rest for rest in ("---", "───", "helptext", "Error parsing", "Unrecognized") if rest in err]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_list_of_commands_fits_any_terminal(run, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run("--help")
    words = {word for name in cli.COMMANDS for word in import_module(f"gpubound.cli.{name}").__doc__.split("\n")[0].split()}
    assert code == 0 and max(map(len, out.splitlines())) <= columns and words <= set(out.split()), "no word is broken"


def test_env_on_this_very_machine(run, monkeypatch, tmp_path):
    """On whatever this is; only buffers and products are smaller."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ceiling, "_cpu_buffer_bytes", lambda quick: 1 << 20)
    rate = ceiling._product_rate
    monkeypatch.setattr(ceiling, "_product_rate", lambda most, *rest: rate(64, *rest))
    code, out, err = run("env", "--json", "--device", "cpu")
    found = json.loads(out)
    assert code == 0 and found["policy"]["device"] == "cpu" and found["ceilings"]["fp32_flops_per_s"] > 0
    assert "measuring" in err, "nobody waits without a line"


# --- bench ---


def test_bench_lists_what_there_is(run):
    code, out, _ = run("bench")
    assert code == 0 and message("cli_env:bench_lists_what_there_i").within(" ".join(out.split()))
    assert "\nexample: gpubound bench kernels" in out and max(map(len, out.splitlines())) <= 100


def test_bench_with_an_unknown_name(run):
    code, _, err = run("bench", "kernel")
    assert (code, err) == (2, message("cli_env:bench_with_an_unknown_na"))


def test_bench_outside_a_checkout(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a/b/c/bench.py"))
    assert run("bench", "kernels") == (3, "", f"gpubound bench: {bench.MISSING}\n")
    code, out, err = run("bench", "--help")
    assert (code, err) == (0, "") and f"benchmarks: none here. {bench.MISSING} example: gpubound bench" in " ".join(out.split())


def test_a_benchmark_that_a_signal_ends(run, monkeypatch):
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, -9))
    assert run("bench", "kernels")[0] == 137


def test_bench_passes_options_and_exit_code_on(run, monkeypatch):
    seen = []

    def pretend(command, cwd, env):
        seen.append((command[1:], cwd, env["PYTHONPATH"].split(":")[0]))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(bench.subprocess, "run", pretend)
    root = bench.checkout()
    assert run("bench", "kernels", "--dry")[0] == 3
    assert seen == [(["-m", "benchmarks.bench_kernels", "--dry"], root, str(root))]


CODE = """
import contextlib, io, json, sys
from gpubound.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
    found = [(main(line.split()), [m for m in ("torch", "transformers", "numpy") if m in sys.modules]) for line in sys.argv[1:]]
print(json.dumps([found, err.getvalue().count("Traceback")]))
"""
FILES = {  # command -> what names a file that is not there
    "train": ["nowhere.yaml", "nowhere.yaml --steps 3"],
    "plan": ["nowhere.yaml"],
    "generate": ["nowhere --prompt x", ". --file nowhere.txt"],
    "doctor": ["nowhere.py --epochs 3", "nowhere.json"],
    "fix": ["nowhere.json --try"],
    "place": ["nowhere"],
    "report": ["nowhere"],
    "serve": ["nowhere", ". --token-file nowhere", ". --max-batch 0", ". --host 0.0.0.0"],
}


@pytest.mark.slow
def test_options_are_read_before_torch_is_imported(tmp_path):
    """All in one process: the first command that imports torch is the first that is found with it."""
    config = tmp_path / "config.yaml"
    config.write_text("steps: 3\nlora: {rank: 4}\n")
    wanted = {}
    for command in cli.COMMANDS:
        mistyped = ["--no-such-option 1", *([f"{config} --no-such-option 1"] if command in ("train", "plan") else [])]
        wanted |= {f"{command} --help": 0, **{f"{command} {line}": 2 for line in (*mistyped, *FILES.get(command, []))}}
    done = subprocess.run([sys.executable, "-c", CODE, *wanted], capture_output=True, text=True, check=True)
    found, tracebacks = json.loads(done.stdout)
    assert dict(zip(wanted, found)) == {line: [code, []] for line, code in wanted.items()} and tracebacks == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "users", "wanted"),
    [
        ("train", {}, "passive"),
        ("train", {"OMP_WAIT_POLICY": "active"}, "active"),
        ("train", {"GOMP_SPINCOUNT": "10000"}, None),
        ("doctor", {}, None),
    ],
)
def test_threads_sleep_while_they_wait(command, users, wanted, monkeypatch, capsys):
    """Spinning, they take the cores from each other beside other processes; a script under the doctor runs as it is."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # or it would not be restored after the test
        monkeypatch.delenv(name)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    assert cli.main([command, "nowhere.yaml"]) == 2
    assert os.environ.get("OMP_WAIT_POLICY") == wanted and "nowhere.yaml" in capsys.readouterr().err


def test_a_host_without_memory_is_one_sentence(capsys, monkeypatch):
    def full(argv):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 34359738368 bytes. Error code 12")

    assert cli.guarded("train", full, []) == 2
    line = "gpubound train: out of memory: the host has not 34.4 GB more; free some, or take shorter sequences, fewer at once, "
    assert capsys.readouterr().err == f"{line}or a smaller model.\n"
    with pytest.raises(RuntimeError, match="something else"):
        cli.guarded("train", lambda argv: (_ for _ in ()).throw(RuntimeError("something else")), [])


@pytest.mark.parametrize("command, few", [("init", "sft, lora, dpo, "), ("completion", "bash, zsh, fish. See")])
def test_an_argument_that_is_one_of_a_few_is_asked_for(command, few, capsys):
    assert cli.main([command]) == 2
    assert capsys.readouterr().err.startswith(f"gpubound {command}: got nothing, wanted one of {few}")


@pytest.fixture(scope="module")
def scripts():
    import contextlib
    import io

    texts = {}
    for shell in ("bash", "zsh", "fish"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert cli.main(["completion", shell]) == 0
        texts[shell] = out.getvalue()
    return texts


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["tr"], {"train"}),
        ([""], set(cli.COMMANDS)),
        (["generate", "--top"], {"--top-k", "--top-p"}),
        (["train", "--micro"], {"--micro-batch"}),
        (["completion", "z"], {"zsh"}),
        (["report", "nothing"], set()),
    ],
)
def test_bash_completes(scripts, words, completed):
    line = " ".join(f"'{word}'" for word in ["gpubound", *words])
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _gpubound; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{scripts['bash']}\n{ask}"], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == completed and not done.stderr


def test_the_other_shells_get_the_same_words(scripts):
    assert scripts["zsh"].endswith(scripts["bash"]) and "bashcompinit" in scripts["zsh"].splitlines()[0]
    lines = scripts["fish"].splitlines()
    assert all(line.startswith("complete -c gpubound -n ") for line in lines)
    assert (
        sum(" -a train " in line for line in lines) == 1 and sum(line.endswith('train" -l micro-batch') for line in lines) == 1
    )
