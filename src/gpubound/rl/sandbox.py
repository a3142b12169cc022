"""Run Python code that a model has written, in a separate process with limits of time, memory and file size.

The limits keep a run from being held up, and its machine from being filled. They are no wall against an attacker: the code may
read what this user may read, and reach the network where the machine does. Run models that you do not trust in a container.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

FILE_BYTES = 1 << 20  # that the code may write to a file
SHOWN = 2000  # characters of the output that are kept

# Limits itself before it reads the code, so that nothing has to run between fork and exec of a process with many threads.
CHILD = """
import resource, sys
seconds, memory, size, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
for kind, limit in (("CPU", seconds), ("AS", memory), ("FSIZE", size), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (limit, limit))
sys.argv = [path]
exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
"""


class SandboxResult(NamedTuple):
    passed: bool  # the code ended by itself, without an error
    why: str  # "", or the end of its errors, or the limit that it met
    output: str = ""  # the end of what it printed


def run_code(code: str, seconds: float = 5.0, memory: int = 512 << 20) -> SandboxResult:
    """Run `code` and return how it ended. Processes that it has started end with it."""
    with tempfile.TemporaryDirectory(prefix="gpubound-") as folder:
        path = Path(folder, "answer.py")
        path.write_text(code, encoding="utf-8", errors="replace")
        limits = [str(max(1, int(seconds + 1))), str(memory), str(FILE_BYTES)]
        # Into files, whose size is limited: a pipe would take as much memory as the code prints.
        with open(Path(folder, "output"), "w+b") as output, open(Path(folder, "errors"), "w+b") as errors:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", CHILD, *limits, str(path)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=folder, start_new_session=True,
                env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                why = f"it took more than {seconds:g} seconds"
            else:
                why = "" if process.returncode == 0 else _end(errors) or f"exit code {process.returncode}"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return SandboxResult(not why, why, _end(output))


def _end(file: BinaryIO) -> str:
    """Return the last SHOWN characters of a file."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * SHOWN))
    return file.read().decode(errors="replace")[-SHOWN:].strip()
