"""What a stopped script leaves does not keep the doctor's process for ever."""

import subprocess

import pytest

from tests import forked

LEFT = {
    "thread": "threading.Thread(target=threading.Event().wait, name='feeder').start()",
    "pool": "ThreadPoolExecutor(thread_name_prefix='feeder').submit(threading.Event().wait)",
    "process": "multiprocessing.get_context('fork').Process(target=threading.Event().wait, name='feeder').start()",
}
HEAD = """
import multiprocessing, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from gpubound.doctor.record.script import end_anyway
before = threading.enumerate()
"""


def ended(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([forked.python(), "-c", HEAD + text], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("what", LEFT)
def test_what_waits_for_ever_is_named_and_ended(what):
    done = ended(f"{LEFT[what]}\nend_anyway(3, before, patience=0.2)\nprint('verdict')\nsys.exit(3)")
    assert (done.returncode, done.stdout) == (3, "verdict\n")
    first, last = done.stderr.splitlines()
    assert first.startswith("gpubound doctor: the script was stopped, and left feeder") and first.endswith("up to 0.2 s.")
    assert last.startswith("gpubound doctor: ended feeder") and last.endswith(", which waited for the script.")


def test_what_ends_in_time_is_waited_for():
    work = "threading.Thread(target=lambda: (time.sleep(0.5), print('saved')), name='saver').start()"
    done = ended(f"{work}\nend_anyway(3, before)\nsys.exit(3)")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "saved\n", 1)
    assert ended("end_anyway(3, before)").stderr == ""
