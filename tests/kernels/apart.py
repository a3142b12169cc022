"""Code in a process of its own, where kernels are not interpreted, as they are in the tests' own."""

import subprocess
from pathlib import Path

from .. import forked
from ..processes import plain_environment

ROOT = Path(__file__).parents[2]
LIMIT_S = 3000


def apart(code: str, warning: str = "ignore") -> str:
    """What `code` prints, run from the repository's root. `warning` is what becomes of UserWarnings: ignore, error, default."""
    command = [forked.python(), "-W", f"{warning}::UserWarning", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    return done.stdout
