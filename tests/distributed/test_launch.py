"""The agent that starts the ranks: one failure of many, restarts, signals, logs. Shells are the ranks: they start at once."""

import json
import os
import shlex
import signal
import threading
import time

import pytest

from gpubound.distributed.failures import HUNG, KILLED, RAISED, REFUSED, UNSOUND, Failure, first_of
from gpubound.distributed.launch import launch
from tests.distributed import agent

pytestmark, collected = agent.LEAVES_FILES, agent.collected  # the second is a fixture


def note(rank, said, kind, code, trace=""):
    """What a rank that fails does."""
    about = {"timestamp": "1", "py_callstack": trace, "rank": rank, "kind": kind, "code": code, "when": 1.5}
    left = json.dumps({"message": {"message": said, "extraInfo": about}})
    return f"printf %s {shlex.quote(left)} > $TORCHELASTIC_ERROR_FILE; exit {code}"


def launched(tmp_path, rank_0, rank_1, restarts=0):
    return launch(["sh", "-c", f"if [ $RANK = 0 ]; then {rank_0}; else {rank_1}; fi"], 2, tmp_path / "ranks", restarts)


@pytest.mark.slow
def test_a_killed_rank_is_named_with_its_signal_and_its_log_and_ends_the_others(tmp_path, capfd):
    end = launched(tmp_path, "sleep 60", "echo last words >&2; kill -9 $$")
    assert (end.code, end.failure.rank, end.failure.kind) == (1, 1, KILLED)
    assert "rank 1 (process " in end.failure.sentence and "was killed by SIGKILL" in end.failure.sentence
    assert end.log == tmp_path / "ranks" / "rank-1.log" and end.log.read_text() == "last words\n"
    assert capfd.readouterr() == ("", "")  # neither the agent's report nor what rank 1 wrote


@pytest.mark.slow
def test_a_rank_that_raised_is_the_failure_and_not_those_that_waited_for_it(tmp_path):
    end = launched(tmp_path, note(0, "rank 0 waited", "bereft", 1), note(1, "data: got nothing", REFUSED, 2), restarts=3)
    assert (end.code, end.failure.sentence) == (2, "rank 1: data: got nothing")


@pytest.mark.slow
def test_a_log_that_cannot_be_written_does_not_hide_the_failure(tmp_path):
    """The disk may be full, and that the failure. Here the folder of the logs is gone."""
    gone = f"while [ ! -e {tmp_path}/ranks/rank-1.log ]; do sleep 0.01; done; rm -r {tmp_path}/ranks"
    end = launched(tmp_path, f"{gone}; {note(0, 'out: no space', REFUSED, 2, 'the trace')}", "sleep 60")
    assert (end.code, end.failure.sentence, end.log) == (2, "out: no space", None)


@pytest.mark.slow
def test_what_another_attempt_cannot_mend_is_not_tried_again(tmp_path):
    end = launched(tmp_path, note(0, "", UNSOUND, 1), "sleep 60", restarts=3)
    assert (end.code, end.failure.kind, end.failure.text) == (1, UNSOUND, "")


@pytest.mark.slow
def test_all_begin_again_after_a_lost_rank_and_keep_the_log_of_each_attempt(tmp_path, said):
    end = launched(
        tmp_path, "sleep 1", "echo $TORCHELASTIC_RESTART_COUNT >&2; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || kill -9 $$", 2
    )
    assert (end.code, end.failure) == (0, None)
    logs = {path.name: path.read_text() for path in (tmp_path / "ranks").iterdir()}
    assert logs == {"rank-1.log": "0\n", "rank-1.restart-1.log": "1\n"}
    assert "was killed by SIGKILL" in (line := said()) and line.endswith("; restart 1 of 2, from the newest checkpoint.\n")


@pytest.mark.slow
def test_words_reach_the_ranks_as_they_are(tmp_path):
    """torch's agent would fill in what follows a dollar."""
    launched(tmp_path, f"echo '$$ ${{local_rank}}' > {tmp_path}/words", ":")
    assert (tmp_path / "words").read_text() == "$$ ${local_rank}\n"
    assert not (tmp_path / "ranks").exists()  # nothing was logged


@pytest.mark.slow
@pytest.mark.parametrize("times, code", [(1, 0), (2, 130)])
def test_ctrl_c_goes_to_every_rank_once_to_end_and_twice_to_end_now(tmp_path, times, code):
    """The first is answered by a run that saves itself; the second ends it, as `Stop` does."""
    rank = f"""
        said=0; trap 'said=$((said + 1)); echo $RANK >> {tmp_path}/asked; [ $said = 2 ] && exit 130' INT
        echo $RANK >> {tmp_path}/ready
        while [ $said = 0 ] || [ {times} = 2 ]; do sleep 0.05; done"""

    def press():
        wait_for(tmp_path / "ready", 2)
        os.kill(os.getpid(), signal.SIGINT)
        if times == 2:
            wait_for(tmp_path / "asked", 2)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # ignored, in a suite that runs in the background
    keyboard = threading.Thread(target=press)
    keyboard.start()
    end = launch(["sh", "-c", rank], 2, tmp_path / "ranks")
    keyboard.join()
    assert (end.code, end.failure) == (code, None)
    assert signal.getsignal(signal.SIGINT) is before


def wait_for(path, lines, seconds=60):
    until = time.monotonic() + seconds
    while not path.exists() or len(path.read_text().split()) < lines:
        assert time.monotonic() < until, f"{path} has not {lines} lines"
        time.sleep(0.02)


def test_the_first_failure_is_the_cause():
    killed, raised = Failure(2, KILLED, when=7.0), Failure(1, RAISED, when=6.5)
    assert first_of([killed, raised, Failure(0, "bereft", when=6.0)]) == raised
    assert Failure(0, REFUSED, "out: is a file").sentence == "out: is a file"
    assert Failure(3, RAISED, "KeyError: 'x'").sentence == "rank 3: KeyError: 'x'"
    assert Failure(3, HUNG, "rank 1 is stuck").sentence == "rank 1 is stuck"
