"""The suite itself: what it does where other people's plugins are installed, and how `make test-hard` shuffles it."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_a_plugin_that_warns_does_not_end_the_suite(tmp_path):
    """pytest-benchmark does so beside xdist: once it was an internal error before the first test."""
    (tmp_path / "noisy.py").write_text("import warnings\ndef pytest_configure(config):\n    warnings.warn('of somebody else')\n")
    paths = [str(tmp_path), str(TESTS.parent / "src"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "noisy", "-p", "no:cacheprovider", "--collect-only", __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, cwd=TESTS.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "test_a_plugin_that_warns" in done.stdout, done.stdout + done.stderr
