"""--gpus: what it refuses, and what a rank says and leaves when it fails."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpubound import cli, distributed
from gpubound.cli.ranks import RankOptions, save_when_launcher_ends
from gpubound.cli.session import outcome_of
from gpubound.distributed import join, launch
from gpubound.distributed.failures import Failure, failure_from
from gpubound.distributed.launch import End
from gpubound.errors import DataError
from gpubound.train.loop import Stop
from gpubound.train.recipe import Recipe
from tests.distributed import agent
from tests.distributed.processes import on_ranks, started
from tests.messages import message, refusals

from . import forked, tiny_recipe
from .processes import plain_environment

corpus, config = tiny_recipe.corpus, tiny_recipe.config  # fixtures


pytestmark, collected = agent.LEAVES_FILES, agent.collected  # the second is a fixture


def test_what_cannot_be_started_is_refused(monkeypatch):
    def starts(options, device="cpu"):
        return partial(RankOptions(**options).starts_ranks, device)

    never = {"timeout": 0}, {"timeout": float("inf")}, {"gpus": 2, "restarts": -1}, {"restarts": 3}, {"gpus": 0}
    refusals("cli_many:what_cannot_be_started", starts({"gpus": 2}, "cuda:1"), *map(starts, never))
    for variable in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "1")
    refusals("cli_many:what_torchrun_starts", starts({"gpus": 2}, "auto"), starts({"restarts": 2}, "auto"))


def test_more_gpus_than_the_machine_has_are_refused_and_processes_on_the_cpu_are_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, check=message("cli_many:more_gpus_than_the_machi")):
        RankOptions(gpus=2).starts_ranks("auto")
    assert RankOptions(gpus=2).starts_ranks("cpu") and not RankOptions().starts_ranks("cpu")


def test_the_processes_are_started_with_the_same_command_line_and_the_end_is_said_once(config, monkeypatch, capsys, tmp_path):
    """The sentence, where more is to be read, and what to type; only what another attempt could mend is gone on with."""
    ends = [
        End(1, Failure(1, "killed", "rank 1 (process 7) was killed by SIGKILL"), tmp_path / "rank-1.log"),
        End(2, Failure(0, "refused", "data: there is none.", 2)),
        End(1, Failure(0, "unsound", code=1)),
        End(130),
        End(0),
    ]
    started = []
    monkeypatch.setattr(launch, "launch", lambda *args: started.append(args) or ends.pop(0))
    (tmp_path / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    typed_in = ["train", str(config), "--accumulate", "2", "--gpus", "2", "--restarts", "3", "--resume"]
    assert [cli.main(typed_in) for _ in range(5)] == [1, 2, 1, 130, 0]
    assert started[0] == ([sys.executable, "-m", "gpubound", *typed_in], 2, tmp_path / "run" / "ranks", 3)
    assert capsys.readouterr().err == message("cli_many:the_processes_are_starte", tmp_path, " ".join(typed_in[:-1]))


def test_a_process_that_stands_in_for_a_lost_one_goes_on_from_what_is_saved(monkeypatch):
    assert not RankOptions().is_restart
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # somebody else's torchrun: the user says --resume
    assert not RankOptions().is_restart
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "gpubound-1")
    assert RankOptions().is_restart


def test_ctrl_c_before_a_rank_has_begun_is_one_line(monkeypatch, capsys):
    """A rank imports torch to ask whether it is one, for seconds."""

    def importing():
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(distributed, "launched", importing)
    assert cli.main(["report"]) == 130
    assert capsys.readouterr() == ("", "gpubound: interrupted\n")


def refuse():
    raise DataError("rows: they are damaged; restore them.")


def refuse_on_all():
    raise DataError("data: there is none.")


def run_out():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def failing(fate, folder, run):
    """Rank 1 meets its fate while rank 0 waits for it, as commands do under an agent."""
    rank = int(os.environ["RANK"])
    log = os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ |= {"TORCHELASTIC_ERROR_FILE": str(folder / f"note-{rank}"), "TORCHELASTIC_RUN_ID": run}

    def command(argv):
        with join("cpu") as ranks:
            if ranks.rank == 1 or fate is refuse_on_all:
                time.sleep(0.2 * (1 - ranks.rank))  # the first is the last to come to it
                fate()
            ranks.gather("here")
        return 0

    return cli.guarded("train", command, [])


class Ended:
    """What torch's agent says of an ended process: its `ProcessFailure`."""

    def __init__(self, note, code):
        self.message, self.exitcode, self.pid, self.timestamp = json.loads(note.read_text())["message"], code, 1, 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "fate, code, sentence",
    [
        (refuse, 2, "rank 1: rows: they are damaged; restore them."),
        (run_out, 1, "rank 1 ran out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB; "
                     "take a smaller micro_batch, or recompute=blocks."),
    ],
)  # fmt: skip
def test_a_rank_leaves_a_note_of_its_own_sentence_and_its_log_has_the_traceback(tmp_path, fate, code, sentence):
    processes, pipes, _ = started(2, failing, fate, tmp_path, "gpubound-test")
    assert pipes[1].recv() == code
    processes[1].join()
    assert pipes[0].recv() == 1
    failure = failure_from(1, Ended(tmp_path / "note-1", code))
    assert (failure.code, failure.sentence) == (code, sentence)
    assert f"in {fate.__name__}\n" in (log := (tmp_path / "stderr-1").read_text()) and sentence in log
    assert failure_from(0, Ended(tmp_path / "note-0", 1)).kind == "bereft"
    assert (tmp_path / "stderr-0").read_text() == ""  # the process that started them speaks


@pytest.mark.slow
def test_what_all_ranks_refuse_alike_is_no_ranks_own(tmp_path):
    processes, pipes, _ = started(2, failing, refuse_on_all, tmp_path, "gpubound-test")
    assert [pipe.recv() for pipe in pipes] == [2, 2]
    for rank, process in enumerate(processes):
        process.join()
        assert failure_from(rank, Ended(tmp_path / f"note-{rank}", 2)).sentence == "data: there is none."


@pytest.mark.slow
def test_a_rank_knows_that_another_was_killed(tmp_path):
    processes, pipes, _ = started(2, failing, die, tmp_path, "gpubound-test")
    assert pipes[0].recv() == 1
    assert failure_from(0, Ended(tmp_path / "note-0", 1)).kind == "bereft"
    assert processes[1].join() is None and processes[1].exitcode == -signal.SIGKILL


def all_refuse(folder):
    log = os.open(folder / f"stderr-{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    return cli.guarded("train", lambda argv: refuse(), [])


@pytest.mark.slow
def test_under_somebody_elses_torchrun_one_rank_speaks(tmp_path):
    assert on_ranks(3, all_refuse, tmp_path) == [2, 2, 2]
    said = [(tmp_path / f"stderr-{rank}").read_text() for rank in range(3)]
    assert sorted(map(len, said))[:2] == [0, 0]
    assert "".join(said).removeprefix("gpubound train: ").removeprefix("rank 1: ").removeprefix("rank 2: ") == (
        message("cli_many:under_somebody_elses_tor")
    )


def orphaned():
    """As Linux does it to a rank whose launcher is killed: once for each thread of it."""
    os.environ["TORCHELASTIC_RUN_ID"] = "gpubound-test"

    def command(argv):
        save_when_launcher_ends()
        with Stop() as stop:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
        return 0 if stop.asked == "SIGTERM" else 1

    return cli.guarded("train", command, [])


@pytest.mark.slow
def test_a_training_rank_whose_launcher_is_gone_is_asked_to_end_once():
    assert on_ranks(1, orphaned) == [0]


LAUNCH = """
import sys
from pathlib import Path
from gpubound.distributed.launch import launch
launch([sys.executable, "-c", sys.argv[1], sys.argv[2]], 2, Path(sys.argv[2], "logs"))
"""
RANK = """
import os, sys, time
from pathlib import Path
from gpubound.cli.ranks import run_as_rank
from gpubound.distributed import join

folder, early, parent = Path(sys.argv[1]), os.environ["RANK"] == "0", os.getppid()
os.environ["WORLD_SIZE"] = "3"  # the third never comes
os.environ["MASTER_PORT"] = "9"  # where nobody listens, as after the end of the launcher
def command():
    if not early:
        (folder / f"rank-{os.environ['RANK']}").write_text(f"{os.getpid()}\\n")
    with join("cpu"):
        return 0
if early:
    (folder / f"rank-{os.environ['RANK']}").write_text(f"{os.getpid()}\\n")
    while os.getppid() == parent:
        time.sleep(0.01)
sys.exit(run_as_rank("train", command, lambda error: (1, str(error))))
"""


def running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal to a child whose parent ends")
def test_ranks_that_have_not_joined_end_with_their_launcher(tmp_path):
    """Killed before the first rank has asked the kernel for its signal, and while the second waits for another rank inside of
    torch."""
    launcher = subprocess.Popen([forked.python(), "-c", LAUNCH, RANK, str(tmp_path)], env=plain_environment())
    processes = []
    try:
        for rank in range(2):
            file, until = tmp_path / f"rank-{rank}", time.monotonic() + 120
            while not (file.exists() and file.read_text().endswith("\n")):
                assert time.monotonic() < until and launcher.poll() is None, f"rank {rank} has not begun"
                time.sleep(0.05)
            processes.append(int(file.read_text()))
        launcher.kill()
        launcher.wait()
        until = time.monotonic() + 60
        while left := [process for process in processes if running(process)]:
            assert time.monotonic() < until, f"{left} still run"
            time.sleep(0.05)
    finally:
        for process in filter(running, processes):
            os.kill(process, signal.SIGKILL)
        launcher.kill()


@pytest.mark.parametrize(
    "options, said",
    [
        (["--gpus", "2"], "accumulate"), (["--gpus", "2", "--accumulate", "4", "--model", "nowhere"], "nowhere"),
        (["--gpus", "2", "--accumulate", "4", "--data", "nowhere.txt"], "nowhere.txt"),
        (["--gpus", "1000", "--accumulate", "1000"], "1000 processes"),
    ],
)  # fmt: skip
def test_the_launcher_refuses_what_every_rank_would(config, tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.setattr(launch, "launch", lambda *args: pytest.fail("ranks were started"))
    assert cli.main(["train", str(config), *options]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_launcher_refuses_to_begin_a_run_twice(config, tmp_path, monkeypatch, capsys):
    assert cli.main(["train", str(config)]) == 0
    monkeypatch.setattr(launch, "launch", lambda *args: pytest.fail("ranks were started"))
    assert cli.main(["train", str(config), "--accumulate", "2", "--gpus", "2"]) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_on_the_whole_command_saves_the_run_and_says_how_to_go_on(config, tmp_path, capfd, monkeypatch):
    """Two real processes under torch's agent; the keyboard is a thread that waits for the first steps."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # or they would take two minutes
    monkeypatch.setattr("sys.executable", forked.python())
    options = ["train", str(config), "--accumulate", "2", "--steps", "5000", "--gpus", "2"]
    tape = tmp_path / "run" / "steps.jsonl"

    def press():
        until = time.monotonic() + 240
        while not (tape.exists() and tape.stat().st_size) and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    keyboard = threading.Thread(target=press)
    keyboard.start()
    assert cli.main(options) == 0
    keyboard.join()
    said = capfd.readouterr().err
    assert "steps on 2 ranks" in said and message("cli_many:ctrl_c_on_the_whole_comm").within(said)
    assert message("cli_many:ctrl_c_on_the_whole_comm.2", " ".join(options)).within(said)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) and not (tmp_path / "run" / "ranks").exists()


@pytest.mark.parametrize(("noted", "said"), [([], True), ([0.1, 0.2], False)])
def test_waits_that_nobody_measured_are_said(noted, said):
    """A torch whose FSDP does not show them, a GPU where no kernel can be launched: never left out without a word."""
    record = {"loss": 2.0, "tokens_per_s": 1e3, "skipped": 0}
    steps = [record | {"step": step} | ({"waited_ms": noted} if noted and step > 1 else {}) for step in (1, 2, 3)]
    run = SimpleNamespace(
        evaluations={}, done=3, steps=3, best=None, diverged=False, device=torch.device("cpu"), recipe=Recipe(),
        ranks=SimpleNamespace(alone=False, world=2), changes=[],
    )  # fmt: skip
    verdict = outcome_of(run, SimpleNamespace(steps=lambda: steps), SimpleNamespace(asked=None)).verdict  # type: ignore[arg-type]
    assert (message("cli_many:waits_that_nobody_measur").within(verdict)) is said
