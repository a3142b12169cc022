"""Code in a process of its own, where kernels are not interpreted, as they are in the tests' own.

Such processes are forked from one that has imported torch and Triton: a test does not pay for that, 2 s of CPU, again.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from functools import cache
from pathlib import Path

from ..processes import plain_environment

ROOT = Path(__file__).parents[2]
LIMIT_S = 3000


def apart(code: str, warning: str = "ignore") -> str:
    """What `code` prints, run from the repository's root. `warning` is what becomes of UserWarnings: ignore, error, default."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps([code, warning, str(out), str(err)]) + "\n")
        server.stdin.flush()
        status = server.stdout.readline().strip()
        assert status == "0", f"exit status {status}: {err.read_text()}"
        return out.read_text()


@cache
def _server() -> subprocess.Popen:
    command = [sys.executable, "-c", "from tests.kernels import apart; apart.serve()"]
    server = subprocess.Popen(
        command, cwd=ROOT, env=plain_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)  # it ends with its input
    return server


def serve() -> None:
    """Fork for each line of the input, and print how the child ended."""
    import torch  # noqa: F401
    import triton.language  # noqa: F401

    import gpubound.kernels  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(_run(*json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(code: str, warning: str, *files: str) -> int:
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    signal.alarm(LIMIT_S)
    warnings.simplefilter(warning, UserWarning)  # type: ignore[arg-type]
    try:
        exec(compile(code, "<apart>", "exec"), vars(sys.modules["__main__"]))
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
