"""The suite itself: what it does where other people's plugins are installed, and how `make test-hard` shuffles it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from . import forked

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_a_plugin_that_warns_does_not_end_the_suite(tmp_path):
    """pytest-benchmark does so beside xdist: once it was an internal error before the first test."""
    (tmp_path / "noisy.py").write_text("import warnings\ndef pytest_configure():\n    warnings.warn('not ours')\n")
    paths = [str(tmp_path), str(TESTS.parent / "src"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [forked.python(), "-m", "pytest", "-p", "noisy", "-p", "no:cacheprovider", "--collect-only", __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, cwd=TESTS.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "test_a_plugin_that_warns" in done.stdout, done.stdout + done.stderr


def test_every_cell_of_the_hard_suite_runs_every_file():
    """`make test-hard` deals out the files; none may be left behind, whatever the seed."""
    from tests.hard import CELLS, command

    there = sorted(str(path.relative_to(TESTS.parent)) for path in TESTS.rglob("test_*.py"))
    for seed in range(3):
        assert sorted(word for word in command(seed, []) if word.endswith(".py")) == there
    assert {cell.capability for cell in CELLS} == {"default", "avx2", None} and {cell.threads for cell in CELLS} == {1, 2, 4}
    assert any(cell.busy for cell in CELLS)


@pytest.mark.slow
def test_a_cell_says_when_it_failed(capfd, monkeypatch):
    from tests.hard import main

    monkeypatch.setattr("sys.executable", forked.python())

    missing = "tests/test_floors.py::test_there_is_no_such_test"
    assert main(["one-thread", "--seed", "1", "--", "-n0", "-p", "no:cacheprovider", missing]) == 1
    assert "FAILED  one-thread (seed 1)" in capfd.readouterr().out


@pytest.mark.slow
def test_a_forked_python_does_what_python_does(tmp_path):
    """Its files, arguments, environment and folder, its warnings, and how it ends: a code, an error, or a signal."""
    asked = "import os, sys; print(sys.argv, os.getcwd(), os.environ['MINE'], sys.stdin.read(), __name__); sys.exit(3)"
    where = {"cwd": tmp_path, "env": {**os.environ, "MINE": "is here"}}
    told = {"input": "and heard", "capture_output": True, "text": True}
    ways = (["-c", asked, "a b"], ["-W", "error", "-c", "import warnings; warnings.warn('seen')"], ["-m", "no.such"])
    python, theirs = ([subprocess.run([it, *way], **where, **told) for way in ways] for it in (sys.executable, forked.python()))
    assert [done.returncode for done in theirs] == [done.returncode for done in python] == [3, 1, 1]
    assert theirs[0].stdout == python[0].stdout and "is here and heard __main__" in python[0].stdout
    assert "UserWarning: seen" in theirs[1].stderr and "No module named 'no'" in theirs[2].stderr
    waits = [forked.python(), "-u", "-c", "import os, time; print(os.getpid()); time.sleep(60)"]
    for end in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(waits, stdout=subprocess.PIPE, text=True) as caller:
            assert int(caller.stdout.readline()) > 0
            caller.send_signal(end)
            assert caller.stdout.read() == "", "the program's end of the pipe is closed: it is gone, too"
        assert caller.returncode == -end
