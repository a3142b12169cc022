"""One process at a time writes to a run's folder; a lock never outlives its process."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys

import pytest

from gpubound import trace
from gpubound.train.lock import LOCK, locked

HOLD = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX)
os.write(handle, sys.argv[2].encode())
print("held", flush=True)
sys.stdin.read()
"""


def hold(folder, about: str) -> subprocess.Popen:
    """Another process that has the lock, and says so."""
    command = [sys.executable, "-c", HOLD, str(folder / LOCK), about]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    return child


@pytest.mark.parametrize(
    "about, described",
    [
        (f'{{"pid": 7, "host": "{"a" * 99}", "since": "noon"}}', f"process 7 on {'a' * 99} (since noon)"),
        ("", "another process"),
        ("[1]", "another process"),
        ('{"pid": 7}', "another process"),
    ],
)
def test_another_process_has_it_until_it_is_killed(tmp_path, about, described):
    with hold(tmp_path, about) as child:
        with pytest.raises(ValueError) as error, locked(tmp_path):
            pass
        assert str(error.value) == f"{tmp_path} is in use by {described}; wait until it has ended, or give another --out."
        child.kill()
        child.wait()
        with locked(tmp_path):  # what kill -9 left behind strands nobody
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_its_file_names_the_holder(tmp_path):
    with locked(tmp_path / "run"):
        with pytest.raises(ValueError) as error, locked(tmp_path / "run"):
            pass
        assert re.fullmatch(
            rf"{tmp_path}/run is in use by process {os.getpid()} on \S+ \(since [-\d]{{10}} [:\d]{{8}} [+-]\d{{4}}\); "
            "wait until it has ended, or give another --out.",
            str(error.value),
        )
        (tmp_path / "run" / "kept").touch()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["kept"], "the refused one did not take the lock's file away"


def test_a_folder_in_which_nothing_was_written_goes_again(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "runs" / "first"):
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    with locked(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir(), "an empty folder of the user's own stays"


def test_the_holder_ends_between_the_opening_and_the_locking(tmp_path, monkeypatch):
    """The file that was opened is then no longer in the folder; a lock on it would exclude nobody."""
    flock, calls = fcntl.flock, []

    def late(handle, operation):
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(handle)
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        assert len(calls) == 2 and os.path.samestat(os.fstat(calls[-1]), (tmp_path / LOCK).stat())


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def none(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(trace, "_said", set())
    with locked(tmp_path):
        pass
    assert capsys.readouterr().err == (
        f"gpubound: {tmp_path}: its file system has no locks ({os.strerror(errno.ENOLCK)}); "
        f"make sure that no other process trains there.\n"
    )
