"""The suite itself: what it does where other people's plugins are installed, and how `make test-hard` shuffles it."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_a_plugin_that_warns_does_not_end_the_suite(tmp_path):
    """pytest-benchmark does so beside xdist: once it was an internal error before the first test."""
    (tmp_path / "noisy.py").write_text("import warnings\ndef pytest_configure():\n    warnings.warn('not ours')\n")
    paths = [str(tmp_path), str(TESTS.parent / "src"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "noisy", "-p", "no:cacheprovider", "--collect-only", __file__],
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


def test_a_cell_says_when_it_failed(capfd):
    from tests.hard import main

    missing = "tests/test_floors.py::test_there_is_no_such_test"
    assert main(["one-thread", "--seed", "1", "--", "-n0", "-p", "no:cacheprovider", missing]) == 1
    assert "FAILED  one-thread (seed 1)" in capfd.readouterr().out
